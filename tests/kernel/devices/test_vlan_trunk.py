"""A pod with a VLAN interface of its own, and its node with one on the other end of the pair."""

import functools
import ipaddress

import pytest

from agent.lab.lab import Lab
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode
from tests.kernel import links
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.trunks import Trunk, expect_gated

pytestmark = pytest.mark.kernel

# Of the node and of the pod, and the length of their network's prefix.
_IN_VLAN = {4: ("198.18.77.1", "198.18.77.2", 30), 6: ("fd00:18:77::1", "fd00:18:77::2", 64)}


@pytest.mark.parametrize("version", [4, 6])
def test_pod_with_a_vlan_interface_talks_to_its_node_and_is_gated(
    gates: Gates, lab: Lab, version: int
) -> None:
    pod = lab.add_pod("trunk", 1)
    node, address, length = _IN_VLAN[version]
    inside = functools.partial(links.ip_inside, pod)
    for add, lower, own in ((links.ip, pod.interface, node), (inside, "eth0", address)):
        add(
            f"link add link {lower} name vlan7 type vlan id 7",
            f"address add {own}/{length} dev vlan7" + (" nodad" if version == 6 else ""),
            "link set vlan7 up",
        )
    addresses = (*pod.addresses, ipaddress.ip_address(address))
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, addresses))
    start_reply_table(gates, pod.ifindex)
    expect_gated(Trunk(pod, gates, version, node, address))
