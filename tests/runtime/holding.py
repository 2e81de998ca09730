"""A node with one pod in a containerd, until it is killed: `python -m tests.runtime.holding`.

Prints the name of the runtime's cgroups when the pod runs.
"""

import asyncio
import signal

from agent.lab import lab as labs
from tests.runtime import containerd
from tests.runtime.driving import Driver


async def _run_pod(runtime: containerd.Containerd) -> None:
    async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as driver:
        sandbox_id = await driver.run_sandbox("web")
        await driver.start_container(sandbox_id)


def main() -> None:
    # A shell starts background jobs with SIGINT ignored, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    labs.isolate()
    with labs.Lab(), containerd.running(containerd.ptp()) as runtime:
        asyncio.run(_run_pod(runtime))
        print(runtime.name, flush=True)  # noqa: T201
        signal.pause()


if __name__ == "__main__":
    main()
