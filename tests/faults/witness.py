"""A process that needs what agents need of the machine: `python -m tests.faults.witness`.

It has the priority of the agent, wakes up as often as one does, and requests an interface from the
kernel. What holds it up holds an agent up as well, and is no fault of the agent: no processor, or
the kernel's lock RTNL in the hands of another program.
"""

import json
import os
import subprocess
import sys
import threading
import time

from bpf import netlink
from tests import processes

_PAUSE_SECONDS = 0.02
_RTM_GETLINK = 18
_LOOPBACK = bytes(4) + (1).to_bytes(4, "little") + bytes(8)  # struct ifinfomsg


class Witness:
    """The process, as a test sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.witness"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def take(self) -> float:
        """For how many seconds it was held up since the previous call."""
        seconds: float = processes.request(self._process, {})
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Measure:
    """The loop's side, of a thread."""

    def __init__(self) -> None:
        self.locked_seconds = 0.0
        self._began = time.monotonic()

    def run(self) -> None:
        requests = netlink.RequestSocket()
        while True:
            self._began = time.monotonic()
            requests.change(_RTM_GETLINK, 0, _LOOPBACK)
            self.locked_seconds += time.monotonic() - self._began
            self._began = float("inf")
            time.sleep(_PAUSE_SECONDS)

    def pending_seconds(self) -> float:
        """For how long the request under way has waited."""
        return max(0.0, time.monotonic() - self._began)


def main() -> None:
    measure = _Measure()
    thread = threading.Thread(target=measure.run, daemon=True)
    thread.start()
    before = 0.0
    for _ in sys.stdin:
        waited = processes.waited_ns(f"{os.getpid()}/task/{thread.native_id}") / 1e9
        # A request's time has that of the processor in it, at most.
        total = measure.locked_seconds + measure.pending_seconds() + waited
        sys.stdout.write(json.dumps(total - before) + "\n")
        sys.stdout.flush()
        before = total


if __name__ == "__main__":
    main()
