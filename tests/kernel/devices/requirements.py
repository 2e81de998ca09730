"""What the tests in this directory need that a machine may lack; one module is needed elsewhere.

`python -m tests.kernels` provides both in its guests; elsewhere these tests are not part of
`make test`, and fail where it is missing.
"""

MODULES = (
    *("openvswitch", "vport-vxlan"),
    *("ipip", "sit", "ip6_tunnel", "fou", "fou6"),
    *("l2tp_eth", "l2tp_ip", "l2tp_ip6", "gtp"),
    *("geneve", "wireguard", "8021q", "ipvlan"),
    "br_netfilter",  # of tests/kernel/test_default_deny.py
)
"""Kernel modules. Debian's kernels have no bareudp."""

PACKAGES = ("openvswitch-switch",)
"""Of the distribution whose files the guests use."""
