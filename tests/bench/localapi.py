"""What the node's own APIs cost: PodInfo, and the node's service endpoints."""

import subprocess
import sys

from tests.bench import flood, hubs, localnet, podinfo


def main() -> None:
    podinfo.run()
    flood.run()
    localnet.run()
    hubs.run()
    # In namespaces of its own.
    subprocess.run([sys.executable, "-m", "tests.bench.proxies"], check=True)


if __name__ == "__main__":
    main()
