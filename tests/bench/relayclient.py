"""The kubelet of bench `relay`: `python -m tests.bench.relayclient`, in the kubelet's cgroup.

Each line of its input is one command of JSON, answered by one line: see `main`. Hosts are pods'
IPv4 addresses.
"""

import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.bench.answering import PORT
from tests.kernel.cgroups import Cgroup

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: pod\r\n\r\n"
_LIMIT_SECONDS = 10
_IN_FLIGHT = 50
_RETRY_SECONDS = 0.0005


class RelayClient:
    """The process, as the bench sees it."""

    def __init__(self, group: Cgroup) -> None:
        self._process = group.popen(
            [sys.executable, "-m", "tests.bench.relayclient"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def probe(
        self, kind: str, hosts: list[str], rounds: int, *, pause_seconds: float = 0
    ) -> list[list[float]]:
        """`rounds` probes of each host in turn; by host, seconds of each. pause_seconds: after
        each probe."""
        found: list[list[float]] = self._request(
            do="probe", kind=kind, hosts=hosts, rounds=rounds, pause_seconds=pause_seconds
        )
        return found

    def connect(self, host: str, count: int) -> float:
        """`count` connections, some at a time; seconds for all."""
        return float(self._request(do="connect", host=host, count=count))

    def hold(self, host: str, count: int) -> None:
        """Open `count` more connections and keep them open."""
        self._request(do="hold", host=host, count=count)

    def let_go(self) -> None:
        self._request(do="let go")

    def fail_over(self, host: str, pid: int) -> float:
        """Kill this process; seconds until a connection that was started afterwards is open."""
        return float(self._request(do="fail over", host=host, pid=pid))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _request(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _tcp(host: str) -> None:
    with socket.create_connection((host, PORT), _LIMIT_SECONDS):
        pass


def _http(host: str) -> None:
    with socket.create_connection((host, PORT), _LIMIT_SECONDS) as sock:
        sock.sendall(REQUEST)
        if not sock.recv(4096).startswith(b"HTTP/1.1 200 "):
            raise AssertionError(f"{host} does not answer")


def _probe(kind: str, hosts: list[str], rounds: int, pause_seconds: float) -> list[list[float]]:
    probe = {"tcp": _tcp, "http": _http}[kind]
    seconds: list[list[float]] = [[] for _ in hosts]
    for turn in range(rounds):
        # Who comes first alternates.
        for number in range(len(hosts)) if turn % 2 else reversed(range(len(hosts))):
            started = time.perf_counter()
            probe(hosts[number])
            seconds[number].append(time.perf_counter() - started)
            if pause_seconds:
                time.sleep(pause_seconds)
    return seconds


def _begin(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    code = sock.connect_ex((host, PORT))
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


def _connect(host: str, count: int) -> float:
    started = time.perf_counter()
    _open(host, count, lambda sock: sock.close())
    return time.perf_counter() - started


def _open(host: str, count: int, done: Callable[[socket.socket], object]) -> None:
    """Keep some under way until `count` are open. Raises `OSError` when one fails."""
    poll = select.epoll()
    under_way: dict[int, socket.socket] = {}
    begun = 0
    deadline = time.monotonic() + _LIMIT_SECONDS
    while begun < count or under_way:
        while begun < count and len(under_way) < _IN_FLIGHT:
            sock = _begin(host)
            under_way[sock.fileno()] = sock
            poll.register(sock, select.EPOLLOUT)
            begun += 1
        for descriptor, _ in poll.poll(_LIMIT_SECONDS):
            sock = under_way.pop(descriptor)
            poll.unregister(descriptor)
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            done(sock)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(under_way)} connections do not open")
    poll.close()


def _fail_over(host: str, pid: int) -> float:
    poll = select.epoll()
    begun: dict[int, socket.socket] = {}
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        while time.perf_counter() - killed < _LIMIT_SECONDS:
            sock = _begin(host)
            begun[sock.fileno()] = sock
            poll.register(sock, select.EPOLLOUT)
            # Each may still have been redirected, so the next does not wait for it.
            for descriptor, _ in poll.poll(_RETRY_SECONDS):
                if not begun[descriptor].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return time.perf_counter() - killed
                poll.unregister(descriptor)
        raise TimeoutError("nothing connects after the relay was killed")
    finally:
        poll.close()
        for sock in begun.values():
            sock.close()


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held: list[socket.socket] = []
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any = None
        match command.pop("do"):
            case "probe":
                answer = _probe(**command)
            case "connect":
                answer = _connect(**command)
            case "hold":
                _open(**command, done=held.append)
            case "let go":
                for sock in held:
                    sock.close()
                held.clear()
            case "fail over":
                answer = _fail_over(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
