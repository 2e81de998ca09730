"""Requests of sock_diag(7) and the kernel's responses, in the bytes of linux/inet_diag.h."""

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator

import pytest

from probes.sock_diag import LISTEN, Endpoint, InetSocket, SockDiag

TCP = socket.IPPROTO_TCP
# linux/netlink.h, linux/sock_diag.h: message types and flags
ERROR, DONE, BY_FAMILY, DESTROY = 2, 3, 20, 21
REQUEST, ACK, DUMP = 0x1, 0x4, 0x300
# linux/inet_diag.h: attributes
V6_ONLY, CGROUP_ID, SOCKOPT = 11, 21, 22
COOKIE = struct.pack("=II", 0x89ABCDEF, 0x01234567)
V4: Endpoint = ipaddress.ip_address("198.18.0.1"), 8080
PEER_V4: Endpoint = ipaddress.ip_address("198.18.0.2"), 40_000
V6: Endpoint = ipaddress.ip_address("fd00:18::1"), 8080
PEER_V6: Endpoint = ipaddress.ip_address("fd00:18::2"), 40_000
NONE_V4: Endpoint = ipaddress.ip_address("0.0.0.0"), 0


def message(kind: int, flags: int, body: bytes) -> bytes:
    """struct nlmsghdr, sequence number and port 0, and its body up to the next message."""
    padding = bytes(-len(body) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body + padding


def sockid(local: Endpoint, remote: Endpoint, cookie: bytes) -> bytes:
    """struct inet_diag_sockid: ports and addresses in network order, interface, cookie."""
    addresses = [end[0].packed.ljust(16, b"\0") for end in (local, remote)]
    return struct.pack(">HH", local[1], remote[1]) + b"".join(addresses) + bytes(4) + cookie


def request(family: int, states: int, own_id: bytes) -> bytes:
    """struct inet_diag_req_v2 for TCP."""
    return struct.pack("=BBBBI", family, TCP, 0, 0, states) + own_id


def response(
    local: Endpoint,
    remote: Endpoint,
    *attributes: tuple[int, bytes],
    state: int = 1,
    queues: tuple[int, int] = (0, 0),
    user: int = 1000,
    inode: int = 77,
) -> bytes:
    """struct inet_diag_msg, with two timers and `expires` set, and its attributes."""
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    body = struct.pack("=BBBB", family, state, 1, 2) + sockid(local, remote, COOKIE)
    body += struct.pack("=IIIII", 3, *queues, user, inode)
    for kind, value in attributes:
        body += bytes(-len(body) % 4) + struct.pack("=HH", 4 + len(value), kind) + value
    return message(BY_FAMILY, 0, body)


def code(kind: int, number: int) -> bytes:
    return message(kind, 0, struct.pack("=i", number))


class Kernel(socket.socket):
    """Has the responses, and keeps the requests."""

    def __init__(self, responses: Iterable[bytes]) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.requests: list[bytes] = []
        self._responses: Iterator[bytes] = iter(responses)

    def sendto(self, data: bytes, address: tuple[int, int]) -> int:  # type: ignore[override]
        assert address == (0, 0)
        self.requests.append(data)
        return len(data)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        return next(self._responses)[:bufsize]


def mapped(address: Endpoint) -> bytes:
    return bytes(10) + b"\xff\xff" + address[0].packed


def test_sockets_are_listed_with_what_the_kernel_reports_of_each() -> None:
    plain, v6 = response(V4, PEER_V4), response(V6, PEER_V6, user=0, inode=0)
    attributes = (
        (V6_ONLY, b"\1"),
        (99, bytes(4) + b"\x0c"),
        (CGROUP_ID, struct.pack("=Q", 1 << 40 | 5)),
        (SOCKOPT, b"\x20"),
    )
    rich = response(V4, PEER_V4, *attributes)
    no_attribute = struct.pack("=HHQ", 12, CGROUP_ID, 5)
    others = response(V4, PEER_V4, (V6_ONLY, b"\0"), (99, no_attribute), (SOCKOPT, b"\xdf\0"))
    # The second family's list ends with its own message.
    kernel = Kernel([rich + plain, others + code(DONE, 0), v6 + code(DONE, 0)])
    with SockDiag(kernel) as diag:
        found = list(diag.sockets(TCP, 1 << 1 | 1 << 8))
    assert kernel.fileno() == -1
    of_v4 = sockid(V4, PEER_V4, COOKIE)
    ends = socket.AF_INET, TCP, mapped(V4), 8080, mapped(PEER_V4), 40_000, 77
    assert found == [
        InetSocket(*ends, 1 << 40 | 5, of_v4, True, user=1000, is_transparent=True),
        InetSocket(*ends, None, of_v4, user=1000),
        InetSocket(*ends, None, of_v4, user=1000),
        InetSocket(
            *(socket.AF_INET6, TCP, V6[0].packed, 8080, PEER_V6[0].packed, 40_000, 0, None),
            sockid(V6, PEER_V6, COOKIE),
        ),
    ]
    assert {one.cookie for one in found} == {0x0123456789ABCDEF}
    assert kernel.requests == [
        message(BY_FAMILY, REQUEST | DUMP, request(family, 0x102, bytes(48)))
        for family in (socket.AF_INET, socket.AF_INET6)
    ]


def test_list_of_some_ports_and_remotes_has_only_those() -> None:
    kernel = Kernel([response(V4, PEER_V4) + response(V4, V4) + code(DONE, 0)])
    with SockDiag(kernel) as diag:
        wanted = diag.sockets(
            TCP, 0x2, {mapped(PEER_V4)}, families=[socket.AF_INET], port=8080, remote_port=40_000
        )
        assert [found.remote_port for found in wanted] == [40_000]
    own_id = struct.pack(">HH", 8080, 40_000) + bytes(44)
    expected = message(BY_FAMILY, REQUEST | DUMP, request(socket.AF_INET, 0x2, own_id))
    assert kernel.requests == [expected]


@pytest.mark.parametrize(
    ("state", "queues", "is_full"),
    [(10, (5, 4), True), (10, (4, 4), False), (10, (0, 4), False), (1, (5, 4), False)],
)
def test_listener_is_full_beyond_its_limit(
    state: int, queues: tuple[int, int], *, is_full: bool
) -> None:
    """TCP_LISTEN is 10 in net/tcp_states.h, TCP_ESTABLISHED 1."""
    kernel = Kernel([response(V4, NONE_V4, state=state, queues=queues) + code(DONE, 0)])
    with SockDiag(kernel) as diag:
        (found,) = diag.sockets(TCP, LISTEN, families=[socket.AF_INET])
    assert found.is_full is is_full


@pytest.mark.parametrize("kind", [ERROR, DONE])
def test_list_that_the_kernel_refuses_is_an_error(kind: int) -> None:
    refused = code(kind, -errno.ENOENT)
    with SockDiag(Kernel([response(V4, PEER_V4) + refused])) as diag:
        found = diag.sockets(TCP, LISTEN)
        assert next(found).local_port == 8080
        with pytest.raises(FileNotFoundError):
            next(found)


@pytest.mark.parametrize(
    ("local", "remote", "family"),
    [(V4, PEER_V4, socket.AF_INET), (V6, PEER_V6, socket.AF_INET6)],
    ids=["v4", "v6"],
)
def test_connection_is_found_by_its_ends(local: Endpoint, remote: Endpoint, family: int) -> None:
    kernel = Kernel([response(local, remote, (CGROUP_ID, bytes([7, *bytes(7)])))] * 2)
    with SockDiag(kernel) as diag:
        assert diag.user(TCP, local, remote) == 1000
        found = diag.connection(TCP, local, remote)
    assert found is not None
    assert (found.local_port, found.remote_port, found.cgroup) == (8080, 40_000, 7)
    own_id = sockid(local, remote, b"\xff" * 8)
    expected = message(BY_FAMILY, REQUEST, request(family, 0xFFFFFFFF, own_id))
    assert kernel.requests == [expected] * 2


def test_listener_at_the_port_is_not_the_connection() -> None:
    listener = response(V4, NONE_V4, state=10)
    with SockDiag(Kernel([listener] * 2)) as diag:
        assert diag.connection(TCP, V4, PEER_V4) is None
        assert diag.user(TCP, V4, PEER_V4) is None


def test_user_of_a_closed_socket_is_unknown() -> None:
    closed = [response(V4, PEER_V4, user=0, inode=0), response(V4, PEER_V4, state=8)]
    with SockDiag(Kernel(closed)) as diag:
        assert [diag.user(TCP, V4, PEER_V4) for _ in closed] == [None, None]


def test_connection_that_the_kernel_does_not_have_is_none() -> None:
    with SockDiag(Kernel([code(ERROR, -errno.ENOENT)] * 2)) as diag:
        assert diag.connection(TCP, V4, PEER_V4) is None
        assert diag.user(TCP, V4, PEER_V4) is None


def test_lookup_that_the_kernel_refuses_is_an_error() -> None:
    with SockDiag(Kernel([code(ERROR, -errno.EPERM)])) as diag, pytest.raises(PermissionError):
        diag.connection(TCP, V4, PEER_V4)


def test_socket_is_destroyed_by_its_id() -> None:
    results = [0, -errno.ENOENT, -errno.ESTALE, -errno.EOPNOTSUPP]
    own_id = sockid(V6, PEER_V6, COOKIE)
    ends = V6[0].packed, 8080, PEER_V6[0].packed, 40_000
    destroyed = InetSocket(socket.AF_INET6, TCP, *ends, 77, None, own_id)
    kernel = Kernel(code(ERROR, number) for number in results)
    with SockDiag(kernel) as diag:
        assert [diag.destroy(destroyed) for _ in range(3)] == [True, False, False]
        with pytest.raises(OSError, match="supported") as caught:
            diag.destroy(destroyed)
    assert caught.value.errno == errno.EOPNOTSUPP
    expected = message(DESTROY, REQUEST | ACK, request(socket.AF_INET6, 0, own_id))
    assert kernel.requests == [expected] * 4
