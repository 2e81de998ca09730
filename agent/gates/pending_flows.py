"""Pending flows: a pod's flows from before its reply table existed, read from its sockets.

A gate that is attached to a running pod would drop the host's replies to earlier requests. A
connected UDP socket has its peer's address, so its flow can be written into the gate's table. Other
sockets that may wait for a reply have none: an unconnected UDP socket, a raw, ping or SCTP one, a
namespace behind the pod's. Where none of these exists, all flows are known and no grace is needed.
"""

import dataclasses
import errno
import socket
from collections.abc import Iterator

from agent.linux.pod_network import PodNetwork
from bpf import abi
from bpf.replies import ReplyFlow
from probes import sock_diag
from probes.netns import Netns

# Names are those of /proc/net/protocols.
_DATAGRAMS = {
    socket.IPPROTO_UDP: ("UDP", "UDPv6"),
    socket.IPPROTO_UDPLITE: ("UDP-Lite", "UDPLITEv6"),
}

# Protocols that need no table: TCP shows replies by its flags, the others do not leave the machine.
# Any other protocol may wait for replies.
_HARMLESS = frozenset(
    {"TCP", "TCPv6", "MPTCP", "MPTCPv6", "SMC", "SMC6", "NETLINK", "UNIX", "UNIX-STREAM"}
    | {"AF_VSOCK", "ALG"}
)

# All of these have a free slot in an empty table, and later flows as well.
_MAX_FLOWS = abi.QUESTION_SETS * abi.REPLY_WAYS // 4


@dataclasses.dataclass(frozen=True, slots=True)
class PendingFlows:
    """Flows on which a pod may wait for replies."""

    flows: tuple[ReplyFlow, ...]
    unknown: str
    """What else may wait for replies, for messages; empty if nothing does."""


def read(netns: Netns, network: PodNetwork) -> PendingFlows:
    """The pod's existing flows; to be called once its gate records new ones.

    Takes milliseconds: call it from a thread. Raises NetnsGoneError, and OSError.
    """
    in_use = _sockets_in_use(netns)
    unknown = list(network.other_devices)
    handled = _HARMLESS.union(*_DATAGRAMS.values())
    unknown += [f"{count} sockets of {name}" for name, count in in_use if name not in handled]
    flows: list[ReplyFlow] = []
    for protocol, names in _DATAGRAMS.items():
        if not any(name in names for name, _ in in_use):
            continue
        unconnected = 0
        try:
            for flow in _open_flows(netns, protocol):
                if flow is None or len(flows) >= _MAX_FLOWS:
                    unconnected += 1
                else:
                    flows.append(flow)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            unknown.append(f"{names[0]} sockets, which this kernel does not list")
        if unconnected:
            unknown.append(f"{unconnected} unconnected sockets of {names[0]}")
    return PendingFlows(tuple(flows), ", ".join(unknown))


def _sockets_in_use(netns: Netns) -> list[tuple[str, int]]:
    """Protocols with sockets in the namespace, and how many: columns 1 and 3."""
    lines = netns.read_proc_net("protocols").splitlines()[1:]
    counts = ((name, int(count)) for name, _, count, *_ in map(str.split, lines))
    return [(name, count) for name, count in counts if count > 0]


def _open_flows(netns: Netns, protocol: int) -> Iterator[ReplyFlow | None]:
    """One for each socket; None for one that has no peer."""
    with sock_diag.SockDiag.open_in(netns) as diag:
        for found in diag.sockets(protocol, sock_diag.ESTABLISHED | sock_diag.CLOSE):
            peer = abi.unpack_address(found.remote)
            if not found.remote_port:
                yield None
            elif not peer.is_loopback:
                pod = abi.unpack_address(found.local)
                yield ReplyFlow(protocol, pod, found.local_port, peer, found.remote_port)
