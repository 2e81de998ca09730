"""The node's own addresses, for node ports."""

import ipaddress

import pyroute2

from bpf.abi import IPAddress

_RT_SCOPE_UNIVERSE = 0


def read() -> tuple[IPAddress, ...]:
    """Those of this network namespace, sorted; not loopback or link-local ones.

    Only kube-proxy's oldest mode serves node ports on loopback addresses. Blocks for some
    milliseconds.
    """
    with pyroute2.IPRoute() as netlink:
        messages = netlink.get_addr(scope=_RT_SCOPE_UNIVERSE)
        texts = {message.get("IFA_LOCAL") or message.get("IFA_ADDRESS") for message in messages}
    addresses = {ipaddress.ip_address(text) for text in texts if text}
    own = [it for it in addresses if not (it.is_loopback or it.is_link_local or it.is_multicast)]
    return tuple(sorted(own, key=lambda it: (it.version, it.packed)))
