"""A host process that connects to pods all the time: `python -m tests.faults.clients KIND`.

As the kubelet it sends an http request to each pod, and notes each that fails; as an intruder it
connects, and notes each connect that does not fail. In a process of its own, so that nothing else
delays it.
"""

import errno
import functools
import http.client
import json
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from tests import processes
from tests.kernel.cgroups import Cgroup

KUBELET, INTRUDER = "kubelet", "intruder"

Target = tuple[str, int, float]
"""Address, port, and how many seconds a request may take."""

_PAUSE_SECONDS = 0.02
# A connect that is admitted is established within a millisecond, if the machine is not busy.
_ADMITTED_SECONDS = 0.05


class Client:
    """The process, as a test sees it."""

    def __init__(self, group: Cgroup, kind: str) -> None:
        self._process = group.popen(
            [sys.executable, "-m", "tests.faults.clients", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def set_targets(self, targets: list[Target]) -> None:
        """From now on connect to these, and to no other."""
        processes.request(self._process, {"targets": targets})

    def start_again(self) -> None:
        """Forget what was noted, and note nothing of attempts that have started."""
        processes.request(self._process, {"starts_again": True})

    def take(self) -> tuple[int, list[str]]:
        """Attempts since the previous call, and what was noted of them, one line each."""
        attempts, noted = processes.request(self._process, {})
        return attempts, noted

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Attempts:
    """The loops' side: two threads."""

    def __init__(self, kind: str) -> None:
        self._try = _request if kind == KUBELET else _intrude
        self._lock = threading.Lock()
        self._targets: list[Target] = []
        self._count = 0
        self._noted: list[str] = []
        self._starts = 0

    def run(self, *, is_patient: bool) -> None:
        """is_patient: with the targets that have more time than others, which thus wait for no
        relay."""
        while True:
            with self._lock:
                targets = list(self._targets)
            shortest = min((seconds for _, _, seconds in targets), default=0)
            for target in targets:
                if (target[2] > shortest) != is_patient:
                    continue
                started, starts = time.monotonic(), self._starts
                note = self._try(*target)
                with self._lock:
                    # One that was removed meanwhile may be gone.
                    if target not in self._targets or starts != self._starts:
                        continue
                    self._count += 1
                    if note:
                        seconds = time.monotonic() - started
                        self._noted.append(f"{target[0]}:{target[1]} {note} ({seconds:.2f} s)")
            time.sleep(_PAUSE_SECONDS)

    def set_targets(self, targets: list[Target]) -> None:
        with self._lock:
            self._targets = targets

    def start_again(self) -> None:
        with self._lock:
            self._starts += 1
            self._count, self._noted = 0, []

    def take(self) -> tuple[int, list[str]]:
        with self._lock:
            taken = self._count, self._noted
            self._count, self._noted = 0, []
            return taken


def _request(host: str, port: int, seconds: float) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"lost: {type(error).__name__} {error}"
    finally:
        connection.close()
    return "" if status == 200 else f"lost: status {status}"


def _intrude(host: str, port: int, seconds: float) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        if sock.connect_ex((host, port)) != errno.EINPROGRESS:
            return ""
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        if not poll.poll(1000 * _ADMITTED_SECONDS):
            return ""
        is_open = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        return "admitted an intruder" if is_open else ""


def main() -> None:
    attempts = _Attempts(sys.argv[1])
    for is_patient in (False, True):
        run = functools.partial(attempts.run, is_patient=is_patient)
        threading.Thread(target=run, daemon=True).start()
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        if "targets" in command:
            attempts.set_targets(
                [(host, port, seconds) for host, port, seconds in command["targets"]]
            )
        if "starts_again" in command:
            attempts.start_again()
        answer = None if command else attempts.take()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
