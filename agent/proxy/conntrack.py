"""Flows of UDP that netfilter would go on translating to an endpoint that is gone.

Only a conversation's first packet is looked up, and one of UDP has no end: who asks again from the
same port would never come to another endpoint. kube-proxy does the same (pkg/proxy/conntrack).
"""

import contextlib
import socket
from collections.abc import Collection, Mapping

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from bpf.services.tables import ServiceAddress

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def forget(places: Mapping[ServiceAddress, Collection[ServiceAddress]]) -> int:
    """End the flows to each place but those that go to one of its endpoints; how many there were.

    Blocks; the kernel looks at every flow that it tracks, once for each place. Raises `OSError` or
    `NetlinkError`.
    """
    count = 0
    for version, family in _FAMILIES.items():
        own = {place: kept for place, kept in places.items() if place.address.version == version}
        if not own:
            continue
        with NFCTSocket(nfgen_family=family) as netlink:
            for place, kept in own.items():
                count += _forget(netlink, family, place, kept)
    return count


def _forget(
    netlink: NFCTSocket, family: int, place: ServiceAddress, kept: Collection[ServiceAddress]
) -> int:
    asked = NFCTAttrTuple(
        family=family, daddr=str(place.address), proto=place.protocol, dport=place.port
    )
    endpoints = {(str(endpoint.address), endpoint.port) for endpoint in kept}
    ended = []
    # The kernel sorts out by protocol and port; by an IPv6 address it finds nothing.
    roughly = NFCTAttrTuple(family=family, proto=place.protocol, dport=place.port)
    for entry in netlink.dump(tuple_orig=roughly):
        original, reply = (
            NFCTAttrTuple.from_netlink(family, entry.get_attr(name))
            for name in ("CTA_TUPLE_ORIG", "CTA_TUPLE_REPLY")
        )
        if asked == original and (reply.saddr, reply.sport) not in endpoints:
            ended.append(original)
    for original in ended:
        with contextlib.suppress(NetlinkError):  # it ended by itself
            netlink.entry("del", tuple_orig=original)
    return len(ended)
