"""First packets: every way in which a host process can open a flow to a pod with a socket.

None of them waits for an answer: the first packet is sent within the call.
"""

import contextlib
import dataclasses
import errno
import socket
import struct
from collections.abc import Callable

from tests.kernel import frames, links, traffic, uring

# Values of include/uapi/linux/{in,in6,tcp}.h that Python does not name.
IP_TRANSPARENT, IPV6_TRANSPARENT, IPV6_HDRINCL = 19, 75, 36
TCP_FASTOPEN_CONNECT = 30
IPPROTO_MPTCP, IPPROTO_SCTP, IPPROTO_GRE = 262, 132, 47

# Unused, and of the ranges that tests may use.
STRANGER = {4: "198.18.9.9", 6: "fd00:18:9::9"}
LOOPBACK = {4: "127.0.0.1", 6: "::1"}

# The client of TCP Fast Open without a cookie, so that data is in the very first SYN.
_FASTOPEN = ("net/ipv4/tcp_fastopen", str(0x1 | 0x4))


_PING = ("net/ipv4/ping_group_range", "0 0")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The pod's address and ports, and the host's interface towards it."""

    address: str
    interface: str
    tcp_port: int
    udp_port: int

    @property
    def version(self) -> int:
        return 6 if ":" in self.address else 4

    @property
    def family(self) -> int:
        return traffic.family(self.version)

    def ends(self, port: int, *, source: str | None = None) -> frames.Ends:
        whence = source or traffic.NODE[self.version]
        return frames.Ends(
            frames.address(whence), frames.address(self.address), source_port=31000, port=port
        )


@dataclasses.dataclass(frozen=True, slots=True)
class FirstPacket:
    """One way to open a flow. send: needs `allowed`, which `begin` includes; shows: bytes that one
    of its frames contains, at any offset."""

    name: str
    send: Callable[[Target], None]
    shows: bytes = b""
    versions: tuple[int, ...] = (4, 6)
    setting: tuple[str, str] | None = None
    """Of the node, without which it has no such sockets: a name below /proc/sys, and the value."""

    def allowed(self) -> contextlib.AbstractContextManager[None]:
        """The node has the setting until the block ends."""
        return links.sysctl(*self.setting) if self.setting else contextlib.nullcontext()

    def begin(self, target: Target) -> None:
        with self.allowed():
            self.send(target)

    def __str__(self) -> str:
        return self.name


def stream(family: int, protocol: int = 0) -> socket.socket:
    """A TCP socket that does not wait."""
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, protocol)


def datagram(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_DGRAM)


def _begin(sock: socket.socket, address: str, port: int) -> None:
    code = sock.connect_ex((address, port))
    assert code in (0, errno.EINPROGRESS), code


def _connect(target: Target) -> None:
    with stream(target.family) as sock:
        _begin(sock, target.address, target.tcp_port)


def connect_and_reset(target: Target) -> None:
    """Leaves nothing behind: a FIN without its ACK is sent again, also to the pod that has the
    address next."""
    with stream(target.family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        _begin(sock, target.address, target.tcp_port)


def send_datagram(target: Target) -> None:
    with datagram(target.family) as sock:
        sock.sendto(b"unconnected", (target.address, target.udp_port))


def _mptcp(target: Target) -> None:
    with stream(target.family, IPPROTO_MPTCP) as sock:
        _begin(sock, target.address, target.tcp_port)


def _mapped(target: Target) -> None:
    with stream(socket.AF_INET6) as sock:
        _begin(sock, f"::ffff:{target.address}", target.tcp_port)


def _mapped_datagram(target: Target) -> None:
    with datagram(socket.AF_INET6) as sock:
        sock.sendto(b"mapped", (f"::ffff:{target.address}", target.udp_port))


def _bound_to_interface(target: Target) -> None:
    with stream(target.family) as sock:
        name = target.interface.encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        _begin(sock, target.address, target.tcp_port)


def _message_fastopen(target: Target) -> None:
    with stream(target.family) as sock:
        sock.sendto(b"fast-open", socket.MSG_FASTOPEN, (target.address, target.tcp_port))


def _fastopen_connect(target: Target) -> None:
    with stream(target.family) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)
        _begin(sock, target.address, target.tcp_port)
        sock.send(b"fast-open")


def _reconnect(target: Target) -> None:
    """A connection with another, dissolved by AF_UNSPEC, then one with the pod."""
    with (
        socket.create_server((LOOPBACK[target.version], 0), family=target.family) as server,
        stream(target.family) as sock,
    ):
        _begin(sock, *server.getsockname()[:2])
        _disconnect(sock)
        _begin(sock, target.address, target.tcp_port)


def _reconnect_datagram(target: Target) -> None:
    with datagram(target.family) as sock:
        sock.connect((LOOPBACK[target.version], 9))
        _disconnect(sock)
        sock.connect((target.address, target.udp_port))
        sock.send(b"reconnected")


def _disconnect(sock: socket.socket) -> None:
    address = struct.pack("=H14x", socket.AF_UNSPEC)
    code = uring.libc_connect(sock, address)
    assert code == 0, code


def _uring_connect(target: Target) -> None:
    with uring.ring() as ring, stream(target.family) as sock:
        # Linux 5.10 connects again after the shutdown, and waits: three seconds with one retry.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
        ring.begin_connect(sock, uring.sockaddr(target.address, target.tcp_port))
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # else the ring would wait for the connection
        ring.result()


def _uring_send(target: Target) -> None:
    with uring.ring() as ring, datagram(target.family) as sock:
        address = uring.sockaddr(target.address, target.udp_port)
        assert ring.send_to(sock, b"by-a-ring", address) == 9


def _connected_datagram(target: Target) -> None:
    with datagram(target.family) as sock:
        sock.connect((target.address, target.udp_port))
        sock.send(b"connected")


def _corked_datagram(target: Target) -> None:
    with datagram(target.family) as sock:
        sock.sendto(b"cork", socket.MSG_MORE, (target.address, target.udp_port))
        sock.sendto(b"ed", (target.address, target.udp_port))


def _transparent(target: Target) -> None:
    with stream(target.family) as sock:
        _pretend(sock, target)
        _begin(sock, target.address, target.tcp_port)


def _transparent_datagram(target: Target) -> None:
    with datagram(target.family) as sock:
        _pretend(sock, target)
        sock.sendto(b"spoofed", (target.address, target.udp_port))


def _pretend(sock: socket.socket, target: Target) -> None:
    """An address that is not the node's, which CAP_NET_RAW may bind to."""
    is_ipv4 = target.version == 4
    level = socket.IPPROTO_IP if is_ipv4 else socket.IPPROTO_IPV6
    sock.setsockopt(level, IP_TRANSPARENT if is_ipv4 else IPV6_TRANSPARENT, 1)
    sock.bind((STRANGER[target.version], 0))


def _raw(target: Target, protocol: int, payload: bytes) -> None:
    """Without its IP header. Some protocols report a drop to the process: ENOBUFS."""
    with (
        socket.socket(target.family, socket.SOCK_RAW, protocol) as sock,
        contextlib.suppress(OSError),
    ):
        sock.sendto(payload, (target.address, 0))


def send_whole(target: Target, whole: bytes) -> None:
    """An IP packet as it is, its header included."""
    with socket.socket(target.family, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        if target.version == 6:
            sock.setsockopt(socket.IPPROTO_IPV6, IPV6_HDRINCL, 1)
        with contextlib.suppress(OSError):
            sock.sendto(whole, (target.address, 0))


def packet(ends: frames.Ends, protocol: int, payload: bytes) -> bytes:
    """An IP packet without options, of the family of `ends`."""
    make = frames.ipv4 if ends.family == 4 else frames.ipv6
    return make(ends, protocol, payload)


def _raw_syn(target: Target) -> None:
    segment = frames.tcp(target.ends(target.tcp_port), frames.SYN)
    _raw(target, socket.IPPROTO_TCP, segment)


def _raw_syn_with_data(target: Target) -> None:
    segment = frames.tcp(target.ends(target.tcp_port), frames.SYN, data=b"in-the-syn")
    _raw(target, socket.IPPROTO_TCP, segment)


def _spoofed_syn(target: Target) -> None:
    ends = target.ends(target.tcp_port, source=STRANGER[target.version])
    send_whole(target, packet(ends, frames.TCP, frames.tcp(ends, frames.SYN)))


def _spoofed_datagram(target: Target) -> None:
    ends = target.ends(target.udp_port, source=STRANGER[target.version])
    send_whole(target, packet(ends, frames.UDP, frames.udp(ends, b"spoofed-raw")))


def _raw_datagram(target: Target) -> None:
    ends = target.ends(target.udp_port)
    _raw(target, socket.IPPROTO_UDP, frames.udp(ends, b"raw-datagram"))


def _sctp(target: Target) -> None:
    """An INIT chunk (RFC 9260), built here: the kernel may lack the protocol."""
    header = struct.pack("!HHII", 31000, target.tcp_port, 0, 0)
    chunk = struct.pack("!BBHIIHHI", 1, 0, 20, 1, 65536, 1, 1, 1)
    _raw(target, IPPROTO_SCTP, header + chunk + b"sctp-init")


def _gre(target: Target) -> None:
    _raw(target, IPPROTO_GRE, bytes(4) + b"gre-packet")


def _ping(target: Target) -> None:
    _raw(target, _icmp(target), _echo(target))


def _ping_datagram(target: Target) -> None:
    """By the socket that needs no privilege where the node allows it to the process's groups."""
    with (
        socket.socket(target.family, socket.SOCK_DGRAM, _icmp(target)) as sock,
        contextlib.suppress(OSError),
    ):
        sock.sendto(_echo(target), (target.address, 0))


def _icmp(target: Target) -> int:
    return socket.IPPROTO_ICMP if target.version == 4 else socket.IPPROTO_ICMPV6


def _echo(target: Target) -> bytes:
    message = struct.pack("!BBHHH", 8 if target.version == 4 else 128, 0, 0, 7, 1) + b"echo-pg!"
    return message[:2] + struct.pack("!H", frames.checksum(message)) + message[4:]


def _options(target: Target) -> None:
    """IPv4 options, or an IPv6 header of destination options, set on an ordinary socket."""
    with stream(target.family) as sock:
        if target.version == 4:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes((1,)) * 4)
        else:
            header = frames.extension(0)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_DSTOPTS, header)
        _begin(sock, target.address, target.tcp_port)


FIRST_PACKETS = (
    FirstPacket("tcp", _connect),
    FirstPacket("tcp-bound-to-interface", _bound_to_interface),
    FirstPacket("tcp-options", _options),
    FirstPacket("tcp-reconnected", _reconnect),
    FirstPacket("tcp-transparent", _transparent),
    FirstPacket("tcp-mapped", _mapped, versions=(4,)),
    FirstPacket("tcp-msg-fastopen", _message_fastopen, b"fast-open", setting=_FASTOPEN),
    FirstPacket("tcp-fastopen-connect", _fastopen_connect, b"fast-open", setting=_FASTOPEN),
    FirstPacket("tcp-io-uring", _uring_connect),
    FirstPacket("mptcp", _mptcp),
    FirstPacket("raw-syn", _raw_syn),
    FirstPacket("raw-syn-with-data", _raw_syn_with_data, b"in-the-syn"),
    FirstPacket("raw-syn-spoofed", _spoofed_syn),
    FirstPacket("udp", send_datagram, b"unconnected"),
    FirstPacket("udp-connected", _connected_datagram, b"connected"),
    FirstPacket("udp-corked", _corked_datagram, b"corked"),
    FirstPacket("udp-mapped", _mapped_datagram, b"mapped", versions=(4,)),
    FirstPacket("udp-reconnected", _reconnect_datagram, b"reconnected"),
    FirstPacket("udp-transparent", _transparent_datagram, b"spoofed"),
    FirstPacket("udp-io-uring", _uring_send, b"by-a-ring"),
    FirstPacket("raw-udp", _raw_datagram, b"raw-datagram"),
    FirstPacket("raw-udp-spoofed", _spoofed_datagram, b"spoofed-raw"),
    FirstPacket("sctp", _sctp, b"sctp-init"),
    FirstPacket("gre", _gre, b"gre-packet"),
    FirstPacket("ping", _ping, b"echo-pg!"),
    FirstPacket("ping-datagram", _ping_datagram, b"echo-pg!", setting=_PING),
)
