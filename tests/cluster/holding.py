"""A cluster of one node, until it is killed: `python -m tests.cluster.holding BIN IMAGE`.

Prints the name of its cgroups when a pod is ready.
"""

import pathlib
import signal
import sys

from agent.lab import lab as labs
from tests.cluster import one_node, workloads


def main() -> None:
    # A shell starts background jobs with SIGINT ignored, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    binaries, image = map(pathlib.Path, sys.argv[1:])
    labs.isolate()
    with (
        one_node.running(binaries, image) as node,
        workloads.namespace(node.api, "held") as users,
    ):
        users.run("web")
        users.until_ready("web")
        print(node.runtime.name, flush=True)  # noqa: T201
        signal.pause()


if __name__ == "__main__":
    main()
