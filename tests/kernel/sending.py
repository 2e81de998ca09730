"""Everything by which a process can reach a destination, as a script: in the cgroup in which it was
started. Prints the result of each way as JSON: 0, or an errno; what it sends is the way's name.

Arguments: address, port, the file cgroup.procs of another cgroup, and the ways.
"""

import json
import os
import socket
import struct
import sys
from collections.abc import Callable

from tests.kernel import uring

IPPROTO_MPTCP, MSG_FASTOPEN, IPV6_CHECKSUM = 262, 0x20000000, 7
EINPROGRESS = 115
_LIMIT_SECONDS = 20

Address = tuple[str, int]


def _family(to: Address) -> int:
    return socket.AF_INET6 if ":" in to[0] else socket.AF_INET


def _connect(sock: socket.socket, to: Address) -> int:
    sock.settimeout(_LIMIT_SECONDS)
    return sock.connect_ex(to)


def tcp(way: str, to: Address) -> int:
    with socket.socket(_family(to), socket.SOCK_STREAM) as sock:
        return _connect(sock, to)


def mapped(way: str, to: Address) -> int:
    """IPv4 by an IPv6 socket."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        return _connect(sock, (f"::ffff:{to[0]}", to[1]))


def mptcp(way: str, to: Address) -> int:
    with socket.socket(_family(to), socket.SOCK_STREAM, IPPROTO_MPTCP) as sock:
        return _connect(sock, to)


def fastopen(way: str, to: Address) -> int:
    with socket.socket(_family(to), socket.SOCK_STREAM) as sock:
        sock.sendto(way.encode(), MSG_FASTOPEN, to)
    return 0


def udp(way: str, to: Address) -> int:
    with socket.socket(_family(to), socket.SOCK_DGRAM) as sock:
        sock.sendto(way.encode(), to)
    return 0


def udp_connected(way: str, to: Address) -> int:
    with socket.socket(_family(to), socket.SOCK_DGRAM) as sock:
        sock.connect(to)
        sock.send(way.encode())
    return 0


def raw(way: str, to: Address) -> int:
    """A datagram with its UDP header, as the process writes it."""
    with socket.socket(_family(to), socket.SOCK_RAW, socket.IPPROTO_UDP) as sock:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_CHECKSUM, 6)
        header = struct.pack("!HHHH", 40000, to[1], 8 + len(way), 0)
        sock.sendto(header + way.encode(), (to[0], 0))
    return 0


def uring_connect(way: str, to: Address) -> int:
    with uring.ring() as ring, socket.socket(_family(to), socket.SOCK_STREAM) as sock:
        ring.begin_connect(sock, uring.sockaddr(*to))
        return -ring.result()


def uring_send(way: str, to: Address) -> int:
    with uring.ring() as ring, socket.socket(_family(to), socket.SOCK_DGRAM) as sock:
        return max(0, -ring.send_to(sock, way.encode(), uring.sockaddr(*to)))


def received_tcp(way: str, to: Address) -> int:
    """By a socket that a process of the other cgroup made and passed."""
    with _made_elsewhere(_family(to), socket.SOCK_STREAM) as sock:
        return _connect(sock, to)


def received_udp(way: str, to: Address) -> int:
    with _made_elsewhere(_family(to), socket.SOCK_DGRAM) as sock:
        sock.sendto(way.encode(), to)
    return 0


def given_tcp(way: str, to: Address) -> int:
    """A process of the other cgroup connects by a socket that this one made and passed. Its SYN
    may be lost on the way, so that it waits in vain."""
    with socket.socket(_family(to), socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        result = _elsewhere(lambda: sock.connect_ex(to))
        return 0 if result == EINPROGRESS else result


def given_udp(way: str, to: Address) -> int:
    with socket.socket(_family(to), socket.SOCK_DGRAM) as sock:
        return _elsewhere(lambda: _tried(lambda: udp_by(sock, way, to)))


def udp_by(sock: socket.socket, way: str, to: Address) -> int:
    sock.sendto(way.encode(), to)
    return 0


WAYS: dict[str, Callable[[str, Address], int]] = {
    "tcp": tcp,
    "mptcp": mptcp,
    "fastopen": fastopen,
    "udp": udp,
    "udp-connected": udp_connected,
    "raw": raw,
    "uring-connect": uring_connect,
    "uring-send": uring_send,
    "received-tcp": received_tcp,
    "received-udp": received_udp,
    "given-tcp": given_tcp,
    "given-udp": given_udp,
    "mapped": mapped,
}
DATAGRAMS = ("udp", "udp-connected", "raw", "uring-send", "received-udp", "given-udp")
"""Those that arrive as a datagram with the way's name; the others are connections."""
CONNECTIONS = (
    *("tcp", "mptcp", "fastopen", "uring-connect", "received-tcp", "given-tcp"),
    "mapped",
)


def _move() -> None:
    with open(sys.argv[3], "w", encoding="ascii") as procs:
        procs.write(str(os.getpid()))


def _made_elsewhere(family: int, kind: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if not child:
            _move()
            with socket.socket(family, kind) as made:
                socket.send_fds(theirs, [b"."], [made.fileno()])
            os._exit(0)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        os.waitpid(child, 0)
    return socket.socket(fileno=descriptors[0])


def _elsewhere(call: Callable[[], int]) -> int:
    """The result in a process of the other cgroup, which inherits this one's sockets."""
    child = os.fork()
    if not child:
        _move()
        os._exit(call())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _tried(call: Callable[[], int]) -> int:
    try:
        return call()
    except OSError as error:
        return error.errno or -1


def main() -> None:
    to = sys.argv[1], int(sys.argv[2])
    done = {}
    for way in sys.argv[4:]:
        done[way] = _tried(lambda way=way: WAYS[way](way, to))  # type: ignore[misc]
    sys.stdout.write(json.dumps(done))


if __name__ == "__main__":
    main()
