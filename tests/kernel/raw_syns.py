"""SYNs that no hook of podgate's sees, to many pods: whether and how long a gate is missing."""

import contextlib
import dataclasses
import ipaddress
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection

_IPV6_CHECKSUM = 7
_SYN, _SYN_ACK = 0x02, 0x12
_TCP = struct.Struct("!HHIIBBHHH")
_GAP_SECONDS = 0.3
"""Answers with a longer time between them are of two gaps in enforcement."""


@dataclasses.dataclass(slots=True)
class Target:
    """One address. Times are of the monotonic clock."""

    seen: float
    sent: int = 0
    answers: list[float] = dataclasses.field(default_factory=list)

    def open_seconds(self, since: float = 0.0) -> float:
        """The longest time in which SYNs were answered, from the first to the last of them."""
        longest = 0.0
        began = before = None
        for at in self.answers:
            if at < since:
                continue
            if began is None or before is None or at - before > _GAP_SECONDS:
                began = at
            before = at
            longest = max(longest, at - began)
        return longest


class RawSyns:
    """SYNs by raw sockets of this node to each address that `find` returns, some 30 a second."""

    def __init__(
        self, find: Callable[[], Collection[str]], *, source: str, port: int, ignore_first: bool
    ) -> None:
        """source: the node's IPv4 address; ignore_first: those that `find` returns now."""
        self.targets: dict[str, Target] = {}
        self._find = find
        self._source = source
        self._port = port
        self._known = set(find()) if ignore_first else set()
        self._is_over = threading.Event()
        self._ports = itertools.cycle(range(2000, 30000))
        self._sockets = {4: _open(socket.AF_INET), 6: _open(socket.AF_INET6)}
        work = (self._scan, self._send, lambda: self._receive(4), lambda: self._receive(6))
        self._threads = [threading.Thread(target=one) for one in work]

    def __enter__(self) -> "RawSyns":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.5)  # for the last answers
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        for one in self._sockets.values():
            one.close()

    @property
    def open_seconds(self) -> float:
        """Of the address that was open for the longest time."""
        return max((one.open_seconds() for one in self.targets.values()), default=0.0)

    @property
    def summary(self) -> str:
        """For people."""
        answered = [one for one in self.targets.values() if one.answers]
        sent = sum(one.sent for one in self.targets.values())
        return (
            f"{len(answered)} of {len(self.targets)} addresses answered one of {sent} SYNs, "
            f"for {self.open_seconds:.2f} s at most"
        )

    def _scan(self) -> None:
        while not self._is_over.wait(0.02):
            for address in set(self._find()) - self._known:
                self._known.add(address)
                self.targets[address] = Target(time.monotonic())

    def _send(self) -> None:
        while not self._is_over.wait(0.03):
            for address, target in list(self.targets.items()):
                version = ipaddress.ip_address(address).version
                syn = self._syn(address, next(self._ports))
                with contextlib.suppress(OSError):
                    self._sockets[version].sendto(syn, (address, 0))
                target.sent += 1

    def _receive(self, version: int) -> None:
        while not self._is_over.is_set():
            try:
                data, (source, *_) = self._sockets[version].recvfrom(4096)
            except TimeoutError:
                continue
            segment = data[(data[0] & 15) * 4 :] if version == 4 else data
            _, port, _, acknowledged, _, flags, *_ = _TCP.unpack_from(segment)
            is_answer = flags & _SYN_ACK == _SYN_ACK and acknowledged == port * 7 + 1
            if is_answer and source in self.targets:
                self.targets[source].answers.append(time.monotonic())

    def _syn(self, address: str, port: int) -> bytes:
        header = _TCP.pack(port, self._port, port * 7, 0, 5 << 4, _SYN, 64240, 0, 0)
        if ":" in address:  # the kernel adds the checksum
            return header
        ends = socket.inet_aton(self._source) + socket.inet_aton(address)
        whole = ends + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(header)) + header
        total = sum(struct.unpack(f"!{len(whole) // 2}H", whole))
        total = (total >> 16) + (total & 0xFFFF)
        checksum = ~(total + (total >> 16)) & 0xFFFF
        return header[:16] + struct.pack("!H", checksum) + header[18:]


def _open(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, 16)
    made.settimeout(0.2)
    return made
