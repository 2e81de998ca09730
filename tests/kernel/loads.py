"""Traffic that continues during a test, each in a process of its own; read by `Load`.

`python -m tests.kernel.loads attacker` tries the pods whose addresses it reads from stdin (one JSON
list a line), one each millisecond; `... talker PATH PATH` talks between two pods' namespaces. Both
end with stdin, and then print one JSON object.
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
from collections.abc import Iterator
from typing import Any

from agent.lab.lab import LabPod
from probes.netns import Netns
from tests.kernel import traffic

PORT = 8080
QUESTION_PORT = 5300

# An emulated machine would have no time left for other processes.
_PERIOD_SECONDS = 0.001 * float(os.environ.get("PODGATE_TEST_PATIENCE", "1")) ** 2
# A SYN that was dropped is sent again after a second, and is no attempt of this test.
_PATIENCE_SECONDS = 0.3
_MAX_OPEN = 400
# Much longer than any pause of a busy machine: a connection that takes longer is broken.
_BROKEN_SECONDS = 30
_RAW_PORT = 4242
_SYN = 0x02
_TCP = struct.Struct("!HHIIBBHHH")


class Load:
    """One such process. `result` ends it."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernel.loads", *arguments],
            cwd=pathlib.Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def set_targets(self, addresses: list[str]) -> None:
        """Set the addresses that an attacker tries from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(addresses) + "\n")
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
def attacker() -> Iterator[Load]:
    """A host process. Its result: `attempts`, and `reached`, a list of [address, how]."""
    yield from _started("attacker")


@contextlib.contextmanager
def talker(one: LabPod, other: LabPod) -> Iterator[Load]:
    """Conversations of one pod. Its result: `rounds`, and `broken`, one sentence or nothing."""
    yield from _started("talker", one.netns.path, other.netns.path, other.ipv4)


def _started(*arguments: str) -> Iterator[Load]:
    load = Load(*arguments)
    try:
        yield load
    finally:
        load.kill()


class Attacker:
    """Two ways a tick: connect(2), and a SYN by a raw socket, which no hook at connect sees."""

    def __init__(self) -> None:
        self.attempts = 0
        self.reached: list[tuple[str, str]] = []
        self._open: dict[int, tuple[socket.socket, str, float]] = {}
        self._poll = select.epoll()
        self._raw = socket.socket(
            socket.AF_INET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP
        )

    def run(self) -> None:
        """Until stdin ends."""
        targets: list[str] = []
        turn = 0
        stdin = select.poll()
        stdin.register(sys.stdin, select.POLLIN)
        while True:
            started = time.monotonic()
            if stdin.poll(0):
                line = sys.stdin.readline()
                if not line:
                    break
                targets = json.loads(line)
            if targets:
                turn += 1
                self._try(targets[turn % len(targets)])
            self._look()
            time.sleep(max(0.0, started + _PERIOD_SECONDS - time.monotonic()))
        time.sleep(_PATIENCE_SECONDS)
        self._look()
        result = {"attempts": self.attempts, "reached": self.reached[:20]}
        sys.stdout.write(json.dumps(result))

    def _try(self, address: str) -> None:
        if len(self._open) >= _MAX_OPEN:
            return
        self.attempts += 1
        with contextlib.suppress(OSError):  # ENOBUFS: dropped; ENETUNREACH: the pod is gone
            self._raw.sendto(_syn(address), (address, 0))
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = sock.connect_ex((address, PORT))
        if code == errno.EINPROGRESS:
            self._open[sock.fileno()] = (sock, address, time.monotonic() + _PATIENCE_SECONDS)
            self._poll.register(sock, select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP)
            return
        self._note(address, code)
        sock.close()

    def _look(self) -> None:
        for fd, _ in self._poll.poll(0):
            sock, address, _ = self._open[fd]
            self._note(address, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            self._close(fd)
        for fd, (_, _, deadline) in list(self._open.items()):
            if time.monotonic() < deadline:
                break  # the others are newer
            self._close(fd)
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = self._raw.recv(128)
                source, destination = struct.unpack_from("!HH", packet, (packet[0] & 15) * 4)
                if (source, destination) == (PORT, _RAW_PORT):
                    self.reached.append((socket.inet_ntoa(packet[12:16]), "raw"))

    def _close(self, fd: int) -> None:
        sock, _, _ = self._open.pop(fd)
        self._poll.unregister(fd)
        sock.close()

    def _note(self, address: str, code: int) -> None:
        """A RST of the pod's kernel is an answer too: the SYN has arrived."""
        if code in (0, errno.ECONNREFUSED):
            self.reached.append((address, "connect"))


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


def _syn(address: str) -> bytes:
    fields = (_RAW_PORT, PORT, os.getpid(), 0, _TCP.size // 4 << 4, _SYN, 1024)
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
