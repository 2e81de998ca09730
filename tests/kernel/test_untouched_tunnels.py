"""Pods of another node, whose packets come by VXLAN, talk to pods behind gates as without gates."""

import dataclasses
from collections.abc import Callable

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import BRIDGE, Lab, LabPod
from agent.logs import Event
from bpf import loader, pins
from bpf.gates import Attachment, GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests import polling
from tests.kernel import conversations, links, offers, othernode, syns, traffic, tunnelled
from tests.kernel.counting import Counting
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.test_agent import isolated_as
from tests.kernel.test_host_devices import ATTACHMENTS, has_program
from tests.kernel.test_untouched import expect_nothing_counted

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])
OUTER = pytest.mark.parametrize("outer", [4, 6], ids=["over-ipv4", "over-ipv6"])
MODES = pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.STRICT], ids=["enforce", "strict"])
NODE_DROPPED = (Verdict.DROP, Reason.NODE)
PORT = 80


def vxlan(outer: int) -> othernode.Kind:
    """Without learning: both ends know each other, as flannel and Calico configure them."""
    port, network = tunnelled.VXLAN_PORT, tunnelled.NETWORK
    ends = "local {local} remote {remote}"
    return othernode.Kind("vxlan", outer, f"vxlan id {network} dstport {port} {ends} nolearning")


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How pods are connected, and the tunnel: routed, or a port of their bridge."""

    name: str
    is_bridged: bool
    is_port: bool = False

    def connect(self, other: LabPod, pods: list[LabPod]) -> dict[int, str]:
        if self.is_port:
            return othernode.join_bridge(other)
        return othernode.route(other, pods, is_ethernet=True)


LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        Layout("routed", is_bridged=False),
        Layout("bridged", is_bridged=True),
        Layout("tunnel-on-bridge", is_bridged=True, is_port=True),
    ],
    ids=lambda layout: layout.name,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """This node, and what podgate attaches to it."""

    lab: Lab
    gates: Gates
    loaded: loader.Loaded
    installation: pins.Pins

    def add_pods(self, *, bridged: bool) -> list[LabPod]:
        names = enumerate(("web", "neighbour"), 1)
        return [self.lab.add_pod(name, number, bridged=bridged) for number, name in names]

    def expect_open_to_the_other_node_only(
        self, other: LabPod, pods: list[LabPod], remote: str, mode: Mode
    ) -> None:
        """Gates in this mode, and all programs: the other node's pod `remote` and the first of the
        pods talk, and nothing is dropped; host processes are."""
        pod, version = pods[0], conversations.version_of(remote)
        with (
            pod.listen(PORT),
            othernode.protected(self.loaded, self.installation, other, pods),
        ):
            assert traffic.node_reaches(pod, version, PORT)
            for each in pods:
                self.gates.install(each.ifindex, GateConfig(mode, each.addresses))
                start_reply_table(self.gates, each.ifindex)
            countings = [Counting(self.gates, each.ifindex) for each in pods]
            on_devices_and_hooks = Counting(self.gates)

            othernode.talk(other, pod, remote)
            expect_nothing_counted(countings)
            assert on_devices_and_hooks.moved() == {}

            expect_closed_to_host_processes(pod, version)
            assert countings[0].moved()[NODE_DROPPED] == 2


def expect_closed_to_host_processes(pod: LabPod, version: int) -> None:
    """A hook or the gate drops the connection, the gate the datagram."""
    address = traffic.address(pod, version)
    assert traffic.is_dropped(address, PORT)
    interface = BRIDGE if pod.is_bridged else pod.interface
    syns.send_datagram(syns.Target(address, interface, PORT, conversations.UDP_PORT))


@pytest.fixture
def node(lab: Lab, gates: Gates, loaded: loader.Loaded, installation: pins.Pins) -> Node:
    return Node(lab, gates, loaded, installation)


@MODES
@LAYOUTS
@OUTER
@VERSIONS
def test_pods_of_another_node_and_enforced_pods_talk_by_vxlan(
    node: Node, version: int, outer: int, layout: Layout, mode: Mode
) -> None:
    other = othernode.add(node.lab)
    pods = node.add_pods(bridged=layout.is_bridged)
    with othernode.tunnel(other, vxlan(outer)):
        remote = layout.connect(other, pods)
        node.expect_open_to_the_other_node_only(other, pods, remote[version], mode)


def is_guarded(operator: AgentProcess) -> Callable[[], bool]:
    """Whether the agent has found the tunnel."""

    def holds() -> bool:
        found = operator.log_lines(Event.TUNNEL_PORTS_PROTECTED)
        return [line["udp_ports"] for line in found][-1:] == [[tunnelled.VXLAN_PORT]]

    return holds


@pytest.mark.parametrize(
    ("mode", "reason"), [("enforce", "Enforced"), ("strict", "Strict")], ids=["enforce", "strict"]
)
@ATTACHMENTS
def test_pods_of_another_node_and_pods_of_an_agent_talk_by_vxlan(
    operator: AgentProcess, lab: Lab, attachment: Attachment, mode: str, reason: str
) -> None:
    if attachment is Attachment.TCX:
        offers.need_tcx()
    if mode == "strict":
        offers.need_netns_cookie()
    other, pod = othernode.add(lab), lab.add_pod("web", 1)
    with (
        othernode.tunnel(other, vxlan(4)),
        links.default_route(other.ipv4, other.interface),
        links.default_route(other.ipv6, other.interface),
        pod.listen(PORT),
    ):
        remote = othernode.route(other, [pod], is_ethernet=True)
        operator.write_manifest(pod, mode=mode, container={})
        ranges = ("--relay-range4", "198.19.64.0/18", "--relay-range6", "fd00:18:65::/64")
        operator.start("--attach", attachment.value, *ranges)
        operator.wait_for("the gate", isolated_as("web", reason))
        polling.wait_until("the tunnel's port is protected", is_guarded(operator))
        assert has_program(operator, other.interface, attachment)
        for version in (4, 6):
            othernode.talk(other, pod, remote[version])
            assert traffic.is_dropped(traffic.address(pod, version), PORT)
