"""Whether a packet would be a reply to the pod, from the reply table and the host's sockets."""

import ipaddress
import socket
from collections.abc import Iterable

from bpf import abi, loader
from bpf.abi import IPAddress
from bpf.replies import ReplyFlow, ReplyTables
from probes.sock_diag import CLOSE_WAIT, ESTABLISHED, SockDiag

_GROUPS = {4: ipaddress.ip_address("224.0.0.1"), 6: ipaddress.ip_address("ff02::1")}


def is_recorded(
    loaded: loader.Loaded,
    ifindex: int,
    protocol: int,
    pod: tuple[IPAddress, int],
    peers: Iterable[IPAddress],
    peer_port: int,
    now_ns: int,
) -> bool:
    """Whether the pod opened a flow from its address and port to this port of one of the peers, or
    of a group. Raises `BpfError`."""
    tables = ReplyTables(loaded)
    address, port = pod
    same_family = [peer for peer in peers if peer.version == address.version]
    return any(
        tables.contains(ifindex, ReplyFlow(protocol, address, port, peer, peer_port), now_ns)
        for peer in [*same_family, _GROUPS[address.version]]
    )


def is_connected(pod: tuple[IPAddress, int], source_port: int) -> bool:
    """Whether the host has an open TCP connection from this port to the pod's address and port."""
    address, port = pod
    with SockDiag() as diag:
        found = diag.sockets(
            socket.IPPROTO_TCP,
            ESTABLISHED | CLOSE_WAIT,
            {abi.pack_address(address)},
            port=source_port,
        )
        return any(sock.remote_port == port for sock in found)
