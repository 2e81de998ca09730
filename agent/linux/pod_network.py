"""A pod's interfaces and addresses, read from its own network namespace.

Not from the API: lifecycle hooks reach a pod before the API has its addresses, and the gate must
also close addresses that the API does not have.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Mapping

from agent.linux import netlink, rtnetlink
from agent.linux.procfs import raise_own
from agent.linux.rtnetlink import Link
from bpf.abi import IPAddress
from bpf.netlink import HEADER_BYTES, NLM_F_ACK, attribute, attributes
from probes.netns import Netns

# Kinds by which the host reaches the pod without a veth pair that podgate can gate. No kind at all
# is a physical device that was moved into the namespace: SR-IOV, host-device.
_UNSUPPORTED = {None: "a physical device", "macvlan": "macvlan", "macvtap": "macvtap"} | {
    kind: kind for kind in ("ipvlan", "ipvtap", "netkit", "vlan")
}
_TIMEOUT_SECONDS = 5

# include/uapi/linux/rtnetlink.h, if_addr.h and net_namespace.h
_RTM_GETADDR, _RTM_NEWNSID, _RTM_GETNSID = 22, 88, 90
_IFADDR = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTGEN = struct.Struct("=Bxxx")  # family
_NETNSA_NSID, _NETNSA_FD = 1, 3
_S32 = struct.Struct("=i")


@dataclasses.dataclass(frozen=True, slots=True)
class HostInterface:
    """The host's end of one of the pod's veth pairs."""

    ifindex: int
    name: str
    bridge: int | None = None
    """ifindex of the bridge that it is a port of."""


@dataclasses.dataclass(frozen=True, slots=True)
class PodNetwork:
    """Interfaces and addresses of a pod's namespace, from inside and from the host."""

    interfaces: tuple[HostInterface, ...]
    addresses: tuple[IPAddress, ...]
    """All destination addresses of packets to the pod: all but loopback, IPv4 first."""
    unsupported: tuple[str, ...]
    """Sentences about interfaces that cannot be gated."""
    nsid: int | None
    """The namespace's number in the host's namespace; netlink hints contain it."""
    other_devices: tuple[str, ...] = ()
    """Names of other interfaces that are up: others behind them may use the pod's address."""
    taps: tuple[str, ...] = ()
    """Names of tap devices, which connect a virtual machine in the pod."""
    is_loopback_down: bool = False
    """Then connections from inside the namespace to the pod's own addresses do not arrive."""
    by_interface: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Addresses by the interface's name in the pod, without loopback, IPv4 first."""

    @property
    def probe_addresses(self) -> tuple[str, ...]:
        """As status.podIPs, so without link-local ones; some may be unconfirmed."""
        return tuple(str(a) for a in self.addresses if not a.is_link_local)


class PodNetworkReader:
    """Reads pods' networks, each within 5 s. For the event loop."""

    async def read(self, netns: Netns) -> PodNetwork:
        """Raises `NetnsGoneError`, `OSError` or `TimeoutError`."""
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            found, assigned, peers, nsid = await netlink.within(
                lambda pod: _read(pod, netns.path), netns=netns
            )
        own = [
            (link, peer)
            for link, peer in peers
            if peer is not None and _is_other_end(peer, of=link, nsid=nsid)
        ]
        ours = {link.index for link, _ in own}
        routable = {address for _, address in assigned if not address.is_loopback}
        return PodNetwork(
            tuple(HostInterface(peer.index, peer.name, peer.master) for _, peer in own),
            tuple(sorted(routable, key=lambda address: (address.version, address))),
            tuple(
                f"interface {link.name} ({_UNSUPPORTED[link.kind]}) cannot be gated"
                for link in found
                if link.kind in _UNSUPPORTED and link.is_up and not link.is_loopback
            ),
            nsid,
            tuple(
                link.name
                for link in found
                if link.is_up and not link.is_loopback and link.index not in ours
            ),
            tuple(link.name for link in found if link.is_tap),
            any(link.is_loopback and not link.is_up for link in found),
            _by_interface(found, assigned),
        )

    async def exists(self, ifindex: int) -> bool:
        """Whether the host has this interface. Raises `OSError`."""
        return await rtnetlink.find(ifindex) is not None


async def netns_number(path: str) -> int | None:
    """The number of a network namespace in this one; None if it is gone.

    One without a number, to which no link leads, gets one: the kernel chooses it, and takes it back
    when the namespace ends. Raises `OSError` if that is unknown: this process has no descriptor or
    memory left.
    """
    return await netlink.within(lambda host: _netns_number(host, path))


def _read(
    pod: netlink.Exchange, path: str
) -> tuple[list[Link], list[tuple[int, IPAddress]], list[tuple[Link, Link | None]], int | None]:
    """A namespace's links and addresses, and its `_other_ends`."""
    found, assigned = rtnetlink.read_in(pod), _addresses_in(pod)
    with netlink.opened(None) as host:
        return found, assigned, *_other_ends(netlink.Exchange(host), found, path)


def _other_ends(
    host: netlink.Exchange, links: Iterable[Link], path: str
) -> tuple[list[tuple[Link, Link | None]], int | None]:
    """The veths among a pod's links, each with the link of the host that may be its other end, and
    the number of the pod's namespace."""
    # The request for the other end also makes the kernel number the pod's namespace.
    ends = [
        (link, rtnetlink.found_in(host, link.peer))
        for link in links
        if link.kind == "veth" and link.peer
    ]
    return ends, _netns_number(host, path)


def _netns_number(host: netlink.Exchange, path: str) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise_own(error)
        return None
    try:
        body = _RTGEN.pack(0) + attribute(_NETNSA_FD, _S32.pack(fd))
        if (number := _read_number(host, body)) is not None:
            return number
        any_number = attribute(_NETNSA_NSID, _S32.pack(-1))
        with contextlib.suppress(FileExistsError):  # another process, or a new link, was faster
            host.request(_RTM_NEWNSID, body + any_number, NLM_F_ACK)
        return _read_number(host, body)
    except OSError as error:
        raise_own(error)
        # It was deleted meanwhile, and the file that it was mounted on remains.
        return None
    finally:
        os.close(fd)


def _read_number(host: netlink.Exchange, body: bytes) -> int | None:
    """Raises `OSError`."""
    (answer,) = host.request(_RTM_GETNSID, body)
    values = attributes(answer, HEADER_BYTES + _RTGEN.size)
    (nsid,) = _S32.unpack(values[_NETNSA_NSID])
    return int(nsid) if nsid >= 0 else None


def _by_interface(
    links: Iterable[Link], assigned: Iterable[tuple[int, IPAddress]]
) -> dict[str, tuple[str, ...]]:
    names = {link.index: link.name for link in links}
    found: dict[str, list[str]] = {}
    for index, address in sorted(assigned, key=lambda one: (one[1].version, one[1])):
        if index in names and not address.is_loopback:
            found.setdefault(names[index], []).append(str(address))
    return {name: tuple(addresses) for name, addresses in found.items()}


def _is_other_end(peer: Link, *, of: Link, nsid: int | None) -> bool:
    """Whether `peer`, a link of the host, is the other end of the pod's veth `of`.

    Checked from both ends: a veth inside the pod (for instance of a container engine in it) may
    name an ifindex that on the host belongs to another interface.
    """
    is_veth_to_it = peer.kind == "veth" and peer.peer == of.index
    return is_veth_to_it and nsid is not None and peer.peer_nsid == nsid


async def addresses_in(netns: Netns) -> set[IPAddress]:
    """All addresses in a namespace, those of the loopback too.

    Raises `NetnsGoneError`, `TimeoutError` and `OSError`.
    """
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        return {address for _, address in await netlink.within(_addresses_in, netns=netns)}


def _addresses_in(netns: netlink.Exchange) -> list[tuple[int, IPAddress]]:
    """Each with its interface."""
    found: list[tuple[int, IPAddress]] = []
    for message in netns.dump(_RTM_GETADDR, _IFADDR.pack(0, 0, 0, 0, 0)):
        family, _, _, _, ifindex = _IFADDR.unpack_from(message, HEADER_BYTES)
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue  # such as MCTP's, of one byte
        values = attributes(message, HEADER_BYTES + _IFADDR.size)
        # With a peer, IFA_ADDRESS is the peer's (include/uapi/linux/if_addr.h).
        if packed := values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS):
            found.append((ifindex, ipaddress.ip_address(packed)))
    return found
