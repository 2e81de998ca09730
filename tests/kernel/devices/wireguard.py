"""WireGuard between this node and another one, as Flannel, Calico and Cilium use it."""

import base64
import contextlib
import dataclasses
import socket
from collections.abc import Iterator

import pyroute2
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from agent.lab.lab import LabPod
from tests.kernel import othernode, traffic

_PORT = 51820
_KIND = "wireguard"
_NETLINK_GENERIC = 16  # include/uapi/linux/netlink.h


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """One of the two interfaces: the address that the other one sends to, and its key."""

    address: str
    private_key: X25519PrivateKey

    @property
    def public_key(self) -> bytes:
        return self.private_key.public_key().public_bytes_raw()

    def configure(self, netlink: socket.socket, peer: "_End") -> None:
        """netlink: a socket of generic netlink in the namespace of the interface."""
        with contextlib.closing(pyroute2.WireGuard(fileno=netlink.detach())) as wireguard:
            wireguard.set(
                othernode.NAME,
                listen_port=_PORT,
                private_key=base64.b64encode(self.private_key.private_bytes_raw()),
                peer={
                    "public_key": base64.b64encode(peer.public_key),
                    "endpoint_addr": peer.address,
                    "endpoint_port": _PORT,
                    "allowed_ips": ["0.0.0.0/0", "::/0"],
                },
            )


@contextlib.contextmanager
def tunnel(other: LabPod, outer: int) -> Iterator[None]:
    """Both ends, each with the other one as its only peer, without routes."""
    kind = othernode.Kind(_KIND, outer, _KIND, is_ethernet=False)
    own = _End(traffic.NODE[outer], X25519PrivateKey.generate())
    its = _End(traffic.address(other, outer), X25519PrivateKey.generate())
    # pyroute2 is built on asyncio, which accepts datagram sockets only; netlink treats both alike.
    generic = (socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_GENERIC)
    with othernode.tunnel(other, kind):
        own.configure(socket.socket(*generic), its)
        its.configure(other.netns.socket(*generic), own)
        yield
