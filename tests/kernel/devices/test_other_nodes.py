"""Pods of another node, whose packets come by WireGuard or another tunnel that the kernel has as a
module, talk to pods behind gates as without gates.

VXLAN is in tests/kernel/test_untouched_tunnels.py.
"""

import pytest

from bpf.verdicts import Mode
from tests.kernel import othernode
from tests.kernel.devices import wireguard
from tests.kernel.othernode import Kind
from tests.kernel.test_untouched_tunnels import MODES, Node, node  # noqa: F401

pytestmark = pytest.mark.kernel

PATHS = pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])
VERSIONS = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])
OUTER = pytest.mark.parametrize("outer", [4, 6], ids=["over-ipv4", "over-ipv6"])

_ENDS = "local {local} remote {remote}"
# A Geneve device has no address of its own.
_GENEVE = "geneve id 42 dstport 6081 remote {remote}"
_ANY = f"ip6tnl mode any encaplimit none {_ENDS}"

KINDS = [
    *((Kind("geneve", outer, _GENEVE), version) for outer in (4, 6) for version in (4, 6)),
    (Kind("ipip", 4, f"ipip {_ENDS}", is_ethernet=False), 4),
    (Kind("sit", 4, f"sit {_ENDS}", is_ethernet=False), 6),
    *((Kind("ip6tnl", 6, _ANY, is_ethernet=False), version) for version in (4, 6)),
]


@MODES
@PATHS
@OUTER
@VERSIONS
def test_pods_of_another_node_and_enforced_pods_talk_by_wireguard(
    node: Node,  # noqa: F811
    version: int,
    outer: int,
    bridged: bool,
    mode: Mode,
) -> None:
    other, pods = othernode.add(node.lab), node.add_pods(bridged=bridged)
    with wireguard.tunnel(other, outer):
        remote = othernode.route(other, pods)
        node.expect_open_to_the_other_node_only(other, pods, remote[version], mode)


@PATHS
@pytest.mark.parametrize(("kind", "version"), KINDS, ids=str)
def test_pods_of_another_node_and_enforced_pods_talk_by_a_tunnel(
    node: Node,  # noqa: F811
    kind: Kind,
    version: int,
    bridged: bool,
) -> None:
    other, pods = othernode.add(node.lab), node.add_pods(bridged=bridged)
    with othernode.tunnel(other, kind):
        families, is_ethernet = (version,), kind.is_ethernet
        remote = othernode.route(other, pods, families=families, is_ethernet=is_ethernet)
        node.expect_open_to_the_other_node_only(other, pods, remote[version], Mode.ENFORCE)
