"""Traffic that continues during a test, each in a process of its own; read by `Load`.

`python -m tests.kernel.loads attacker` tries the addresses and ports that it reads from stdin (one
JSON list a line), one each millisecond; `... talker PATH PATH` talks between two pods' namespaces.
Both end with stdin, and then print one JSON object.
"""

import contextlib
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
from typing import Any, BinaryIO

from agent.lab.lab import LabPod
from probes.netns import Netns
from tests.kernel import traffic
from tests.kernel.cgroups import Cgroup
from tests.polling import PATIENCE

PORT = 8080
QUESTION_PORT = 5300

# An emulated machine would have no time left for other processes.
_PERIOD_SECONDS = 0.001 * PATIENCE**2
# A SYN that was dropped is sent again after a second, and is no attempt of this test.
_PATIENCE_SECONDS = 0.3
_MAX_OPEN = 400
# Much longer than any pause of a busy machine: a connection that takes longer is broken.
_BROKEN_SECONDS = 30
_RAW_PORT = 4242
_ATTEMPTS = "attempts"
_SYN = 0x02
_TCP = struct.Struct("!HHIIBBHHH")
_CHECKSUM_AT = 16
_IPV6_CHECKSUM = 7  # include/uapi/linux/in6.h


class Load:
    """One such process. `result` ends it."""

    def __init__(self, *arguments: str, group: Cgroup | None = None) -> None:
        """group: the process's cgroup from its start; None: this process's."""
        command = [sys.executable, "-m", "tests.kernel.loads", *arguments]
        if group is not None:
            self._process = group.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        else:
            self._process = subprocess.Popen(
                command,
                cwd=pathlib.Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )

    def set_targets(self, addresses: Sequence[str], ports: Sequence[int] = (PORT,)) -> None:
        """Set the addresses that an attacker tries from now on, each of them at all these ports."""
        self._send([(address, port) for address in addresses for port in ports])

    def attempts(self) -> int:
        """How many an attacker has made."""
        self._send(_ATTEMPTS)
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def _send(self, request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        output, _ = self._process.communicate(timeout=2 * _BROKEN_SECONDS)
        found: dict[str, Any] = json.loads(output)
        return found

    def kill(self) -> None:
        """Whether or not it has ended."""
        self._process.kill()
        with self._process:
            pass


@contextlib.contextmanager
def attacker(group: Cgroup | None = None) -> Iterator[Load]:
    """A host process, in a cgroup of the test's if one is given. Its result: `attempts`, and
    `reached`, a list of [address, port, how]."""
    yield from _started("attacker", group=group)


@contextlib.contextmanager
def talker(one: LabPod, other: LabPod) -> Iterator[Load]:
    """Conversations of one pod. Its result: `rounds`, and `broken`, one sentence or nothing."""
    yield from _started("talker", one.netns.path, other.netns.path, other.ipv4)


def _started(*arguments: str, group: Cgroup | None = None) -> Iterator[Load]:
    load = Load(*arguments, group=group)
    try:
        yield load
    finally:
        load.kill()


class Attacker:
    """Two ways a tick: connect(2), and a SYN by a raw socket, which no hook at connect sees."""

    def __init__(self) -> None:
        self.attempts = 0
        self.reached: list[tuple[str, int, str]] = []
        self._targets: list[tuple[str, int]] = []
        self._open: dict[int, tuple[socket.socket, tuple[str, int], float]] = {}
        self._poll = select.epoll()
        self._raw = {version: _raw_socket(version) for version in (4, 6)}

    def run(self) -> None:
        """Until stdin ends."""
        turn = 0
        # Unbuffered: `select.poll` does not show what a buffer holds.
        with open(0, "rb", buffering=0, closefd=False) as requests:
            while self._answer(requests):
                started = time.monotonic()
                if self._targets:
                    turn += 1
                    self._try(self._targets[turn % len(self._targets)])
                self._look()
                time.sleep(max(0.0, started + _PERIOD_SECONDS - time.monotonic()))
        time.sleep(_PATIENCE_SECONDS)
        self._look()
        result = {"attempts": self.attempts, "reached": self.reached[:20]}
        sys.stdout.write(json.dumps(result))

    def _answer(self, requests: BinaryIO) -> bool:
        """Handle the requests that wait. False when no more come."""
        waiting = select.poll()
        waiting.register(requests, select.POLLIN)
        while waiting.poll(0):
            line = requests.readline()
            if not line:
                return False
            request = json.loads(line)
            if request == _ATTEMPTS:
                sys.stdout.write(f"{self.attempts}\n")
                sys.stdout.flush()
            else:
                self._targets = [(address, port) for address, port in request]
        return True

    def _try(self, target: tuple[str, int]) -> None:
        if len(self._open) >= _MAX_OPEN:
            return
        self.attempts += 1
        address, _ = target
        version = 6 if ":" in address else 4
        with contextlib.suppress(OSError):  # ENOBUFS: dropped; ENETUNREACH: the pod is gone
            self._raw[version].sendto(_syn(*target), (address, 0))
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        sock = socket.socket(traffic.family(version), kind)
        code = sock.connect_ex(target)
        if code == errno.EINPROGRESS:
            self._open[sock.fileno()] = (sock, target, time.monotonic() + _PATIENCE_SECONDS)
            self._poll.register(sock, select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP)
            return
        self._note(target, code)
        sock.close()

    def _look(self) -> None:
        for fd, _ in self._poll.poll(0):
            sock, target, _ = self._open[fd]
            self._note(target, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            self._close(fd)
        for fd, (_, _, deadline) in list(self._open.items()):
            if time.monotonic() < deadline:
                break  # the others are newer
            self._close(fd)
        ports = {port for _, port in self._targets}
        for version, raw in self._raw.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet, whence = raw.recvfrom(128)
                    # Only IPv4's header is part of what a raw socket receives.
                    header_bytes = (packet[0] & 15) * 4 if version == 4 else 0
                    source, destination = struct.unpack_from("!HH", packet, header_bytes)
                    if source in ports and destination == _RAW_PORT:
                        self.reached.append((whence[0], source, "raw"))

    def _close(self, fd: int) -> None:
        sock, _, _ = self._open.pop(fd)
        self._poll.unregister(fd)
        sock.close()

    def _note(self, target: tuple[str, int], code: int) -> None:
        """A RST of the pod's kernel is an answer too: the SYN has arrived."""
        if code in (0, errno.ECONNREFUSED):
            self.reached.append((*target, "connect"))


class Talker:
    """One pod's conversations with another and with the node: one after the other, numbered."""

    def __init__(self, client: Netns, server: Netns, address: str) -> None:
        self._client = client
        self._listener = server.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((address, PORT + 1))
        self._listener.listen()
        self._listener.settimeout(_BROKEN_SECONDS)
        self._stream = self._connect()
        self._datagrams = self._datagram_pair(server, address)
        # To a host process: its answer is a reply, which a gate must pass.
        self._question = self._datagram_pair(None, traffic.NODE[4])

    def run(self) -> None:
        """Until stdin ends, or something breaks."""
        rounds = 0
        broken = ""
        stdin = select.poll()
        stdin.register(sys.stdin, select.POLLIN)
        while not stdin.poll(1):
            number = struct.pack("!Q", rounds)
            try:
                _round(self._stream, number, "the connection between pods")
                _round(self._datagrams, number, "datagrams between pods")
                _round(self._question, number, "the node's answers")
                if rounds % 10 == 0:
                    fresh = self._connect()
                    _round(fresh, number, "a new connection between pods")
                    for sock in fresh:
                        sock.close()
            except (OSError, AssertionError) as error:
                broken = f"round {rounds}: {error}"
                break
            rounds += 1
        sys.stdout.write(json.dumps({"rounds": rounds, "broken": broken}))

    def _connect(self) -> tuple[socket.socket, socket.socket]:
        client = self._client.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.settimeout(_BROKEN_SECONDS)
        client.connect(self._listener.getsockname())
        server, _ = self._listener.accept()
        for sock in (client, server):
            sock.settimeout(_BROKEN_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client, server

    def _datagram_pair(
        self, server: Netns | None, address: str
    ) -> tuple[socket.socket, socket.socket]:
        client = self._client.socket(socket.AF_INET, socket.SOCK_DGRAM)
        make = server.socket if server else socket.socket
        other = make(socket.AF_INET, socket.SOCK_DGRAM)
        other.bind((address, QUESTION_PORT))
        client.connect(other.getsockname())
        client.send(b"hello")
        _, whence = other.recvfrom(64)
        other.connect(whence)
        for sock in (client, other):
            sock.settimeout(_BROKEN_SECONDS)
        return client, other


def _round(pair: tuple[socket.socket, socket.socket], number: bytes, what: str) -> None:
    """Sends data both ways; none may be lost, duplicated or reordered."""
    one, other = pair
    for sender, receiver in ((one, other), (other, one)):
        try:
            sender.send(number)
            received = receiver.recv(64)
        except OSError as error:
            raise OSError(f"{what}: {error}") from error
        assert received == number, f"{what}: {received!r} instead of {number!r}"


def _raw_socket(version: int) -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
    made = socket.socket(traffic.family(version), kind, socket.IPPROTO_TCP)
    if version == 6:
        made.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, _CHECKSUM_AT)
    else:
        # Part of the checksum, which the kernel computes for IPv6 only.
        made.bind((traffic.NODE[4], 0))
    return made


def _syn(address: str, port: int) -> bytes:
    fields = (_RAW_PORT, port, os.getpid(), 0, _TCP.size // 4 << 4, _SYN, 1024)
    if ":" in address:
        return _TCP.pack(*fields, 0, 0)
    ends = socket.inet_aton(traffic.NODE[4]) + socket.inet_aton(address)
    pseudo = ends + struct.pack("!II", _TCP.size, socket.IPPROTO_TCP)
    return _TCP.pack(*fields, _checksum(pseudo + _TCP.pack(*fields, 0, 0)), 0)


def _checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "attacker":
        Attacker().run()
    else:
        client, server, address = arguments
        Talker(Netns.open(client), Netns.open(server), address).run()


if __name__ == "__main__":
    main()
