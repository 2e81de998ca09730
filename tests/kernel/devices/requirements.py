"""What the tests in this directory need that a machine may lack; two modules are needed elsewhere.

`python -m tests.kernels` provides both in its guests; elsewhere these tests are not part of
`make test`, and fail where it is missing.
"""

MODULES = (
    *("ipip", "sit", "ip6_tunnel", "fou", "fou6"),
    *("l2tp_eth", "l2tp_ip", "l2tp_ip6", "gtp"),
    *("geneve", "wireguard", "8021q", "ipvlan"),
    "br_netfilter",  # of tests/kernel/test_default_deny.py
    "ip_vs",  # of tests/proxy: Linux 5.10 does not load it by the name of its family
)
"""Kernel modules. Debian's kernels have no bareudp."""

SWITCH_MODULES = ("openvswitch", "vport-vxlan")
"""Loaded by the tests that need them: on 6.1 openvswitch has every namespace track connections
(nf_conncount_init in ovs_ct_limit_init), so that others' fragments arrive whole or not at all."""

PACKAGES = ("openvswitch-switch",)
"""Of the distribution whose files the guests use."""
