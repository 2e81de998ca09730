"""Probes at a fixed rate, independent of their results: `python -m tests.kernel.pacing PER_SECOND
TARGET...`.

A target is tcp,HOST,PORT or http,HOST,PORT; they take turns. Each probe has one second, as the
kubelet's default timeoutSeconds, and one attempt (failureThreshold 1). It ends with its standard
input, and then prints one line of JSON for each probe.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tests.polling import PATIENCE, wait_until

if TYPE_CHECKING:
    from tests.kernel.cgroups import Cgroup

_TIMEOUT_SECONDS = PATIENCE
_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n"
_WELL = b"HTTP/1.1 200 "
OK = "ok"
# tcpi_state, tcpi_retransmits and tcpi_unacked of linux/tcp.h.
_TCP_INFO = struct.Struct("=BxB21xI")


@dataclasses.dataclass(frozen=True, slots=True)
class Paced:
    """One probe; times are of CLOCK_MONOTONIC, in seconds."""

    target: str
    started: float
    ended: float
    result: str
    port: int
    """The client's."""

    def was_in_flight(self, since: float, until: float) -> bool:
        return self.started <= until and self.ended >= since


class Pacing:
    """The process, as a test sees it."""

    def __init__(
        self, group: "Cgroup", folder: pathlib.Path, per_second: int, targets: Sequence[str]
    ):
        self._output = folder / "paced"
        with self._output.open("wb") as output:
            self._process = group.popen(
                [sys.executable, "-m", "tests.kernel.pacing", str(per_second), *targets],
                stdin=subprocess.PIPE,
                stdout=output.fileno(),
            )

    def finished(self) -> int:
        """How many probes have ended."""
        return self._output.read_bytes().count(b"\n")

    def wait_for_more(self, count: int) -> None:
        wanted = self.finished() + count
        wait_until(f"{count} more probes", lambda: self.finished() >= wanted)

    def result(self) -> list[Paced]:
        """End it; all of its probes."""
        self._process.communicate()
        lines = self._output.read_text(encoding="ascii").splitlines()
        return [Paced(*json.loads(line)) for line in lines]

    def kill(self) -> None:
        """Whether or not it has ended."""
        self._process.kill()
        with self._process:
            pass


@contextlib.contextmanager
def paced(
    group: "Cgroup", folder: pathlib.Path, per_second: int, targets: Sequence[str]
) -> Iterator[Pacing]:
    made = Pacing(group, folder, per_second, targets)
    try:
        yield made
    finally:
        made.kill()


class _Probe:
    """One connection in progress; `step` returns its result once it is over."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._kind, host, port = target.split(",")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.started = time.monotonic()
        self._is_open = False
        self._answer = b""
        code = self.sock.connect_ex((host, int(port)))
        self.failure = "" if code in (0, errno.EINPROGRESS) else errno.errorcode[code]
        self.port: int = self.sock.getsockname()[1]

    def step(self) -> str:
        """The result, or nothing while there is none. To be called when the socket is ready."""
        try:
            if not self._is_open:
                if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return errno.errorcode[code]
                self._is_open = True
                if self._kind == "tcp":
                    return OK
                self.sock.send(_REQUEST)
            while piece := self.sock.recv(4096):
                self._answer += piece
            return OK if self._answer.startswith(_WELL) else f"{len(self._answer)} bytes, then EOF"
        except BlockingIOError:
            return ""
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    def progress(self) -> str:
        """How far the connection has come: after a lost packet not as far as with a slow server."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        state, sent_again, unacknowledged = _TCP_INFO.unpack(info)
        return f"TCP state {state}, {unacknowledged} unacknowledged, {sent_again} sent again"


class _Pace:
    """All probes under way, in one thread."""

    def __init__(self, period_seconds: float, targets: Sequence[str]) -> None:
        self._period_seconds = period_seconds
        self._targets = targets
        self._epoll = select.epoll()
        # In the order in which they started, so the first is the first to time out.
        self._under_way: dict[int, _Probe] = {}

    def run(self) -> None:
        """Until standard input ends, and then until every probe has."""
        self._epoll.register(sys.stdin, select.EPOLLHUP)
        turn = 0
        due = time.monotonic()
        is_wanted = True
        while is_wanted or self._under_way:
            now = time.monotonic()
            if is_wanted and now >= due:
                self._begin(self._targets[turn % len(self._targets)])
                turn += 1
                due = max(due + self._period_seconds, now - 1)
            for descriptor, _ in self._epoll.poll(max(0.0, due - now) if is_wanted else 0.1):
                if descriptor == sys.stdin.fileno():
                    is_wanted = False
                    self._epoll.unregister(sys.stdin)
                elif result := self._under_way[descriptor].step():
                    self._end(descriptor, result)
            # Only what was not ready a moment ago: a pause of this process is no time-out.
            self._expire(now - _TIMEOUT_SECONDS)

    def _begin(self, target: str) -> None:
        probe = _Probe(target)
        self._under_way[probe.sock.fileno()] = probe
        if probe.failure:
            self._end(probe.sock.fileno(), probe.failure)
        else:
            self._epoll.register(probe.sock, select.EPOLLOUT | select.EPOLLIN | select.EPOLLET)

    def _expire(self, started_before: float) -> None:
        for descriptor, probe in list(self._under_way.items()):
            if probe.started > started_before:
                return
            self._end(descriptor, f"timed out, {probe.progress()}")

    def _end(self, descriptor: int, result: str) -> None:
        probe = self._under_way.pop(descriptor)
        probe.sock.close()
        line = json.dumps([probe.target, probe.started, time.monotonic(), result, probe.port])
        os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    _Pace(1 / float(sys.argv[1]), sys.argv[2:]).run()
