"""What kernel tests need, most of them in this directory, that a machine may lack. `python -m tests.kernels` provides
both in its guests; elsewhere these tests are not part of `make test`, and fail where it is missing.
"""

MODULES = (
    *("openvswitch", "vport-vxlan"),
    *("ipip", "sit", "ip6_tunnel", "fou", "fou6"),
    *("l2tp_eth", "l2tp_ip", "l2tp_ip6", "gtp"),
    *("geneve", "wireguard", "8021q", "ipvlan", "br_netfilter"),
)
"""Kernel modules. Debian's kernels have no bareudp."""

PACKAGES = ("openvswitch-switch",)
"""Of the distribution whose files the guests use."""
