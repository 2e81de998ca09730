"""The relay gives other processes no access, and the kubelet access to declared ports only. Other
attempts are rejected and counted.
"""

import contextlib
import errno
import ipaddress
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab.agent_process import Launch, packets, pod_of
from agent.lab.lab import LabPod
from agent.relay import interfaces as relay_interfaces
from agent.relay.messages import Outcome
from agent.settings import RelayRanges, parse_range4, parse_range6
from agent.strict import ranges
from bpf import pins
from probes.netns import Netns
from tests.conftest import fresh_lab
from tests.kernel import cgroups, fleet, frames, links, nodeclient, syns
from tests.kernel.capture import Packet
from tests.kernel.nodeclient import NodeClient
from tests.kernel.strictnode import (
    RANGE4,
    RANGE6,
    FleetPod,
    Node,
    relay_addresses,
    strict_node,
    wait_until,
)

pytestmark = pytest.mark.kernel

WEB_PROBES = (fleet.http_probe(fleet.HTTP),)
BARE_PROBES = (fleet.tcp_probe(fleet.TCP),)
# Of the pods whose addresses tests give to others.
REUSED_NUMBER = 9
_ETH_P_ALL = 0x0003
_PACKET_OUTGOING = 4


@pytest.fixture(scope="module")
def node(
    launch: Launch, installed: pins.Pins, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """A pod that admits the kubelet to every port, one that declares a bare port and listens on two
    more, and one that no manifest names."""
    with (
        fresh_lab() as lab,
        strict_node(lab, tmp_path_factory.mktemp("strict"), launch, installed) as made,
    ):
        made.add("web", 1, ports=(fleet.HTTP,), probes=WEB_PROBES, mode="strict")
        made.add("bare", 2, ports=(fleet.TCP, fleet.HTTP), probes=BARE_PROBES, mode="strict")
        lab.add_pod("stranger", 3)
        made.start()
        yield made


@pytest.fixture
def kubelet(node: Node) -> Iterator[NodeClient]:
    with nodeclient.node_client(node.kubelet) as made:
        yield made


@pytest.fixture
def intruder(node: Node) -> Iterator[NodeClient]:
    with cgroups.cgroup() as group, nodeclient.node_client(group) as made:
        yield made


@pytest.fixture
def inside(node: Node) -> Iterator["Inside"]:
    made = Inside(node)
    yield made
    made.close()


_RANGES = RelayRanges(parse_range4(RANGE4), parse_range6(RANGE6))
# Of the first relay: offset of the destination's address in a frame, and the address.
_WAYS = [
    (offset, share.way.packed)
    for offset, share in zip((14 + 16, 14 + 24), ranges.shares(_RANGES, 0), strict=True)
]


class Inside:
    """A tap in the relay's namespace: packets that arrived by its pair, held or not."""

    def __init__(self, node: Node) -> None:
        netns = Netns.open(f"/proc/{node.relay_pid()}/ns/net")
        self._tap = netns.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))

    def close(self) -> None:
        self._tap.close()

    def arrived(self) -> list[bytes]:
        """Frames since the last call, but for the link's own control, and the agent's tries of the
        way to the relay, at addresses that stand for no pod."""
        seen: list[bytes] = []
        while True:
            try:
                frame, (_, _, kind, *_) = self._tap.recvfrom(2048)
            except BlockingIOError:
                return seen
            if kind == _PACKET_OUTGOING or Packet(frame).is_link_control:
                continue
            if not any(frame.startswith(way, offset) for offset, way in _WAYS):
                seen.append(frame)


def dropped_at_the_pair(report: AgentReport) -> int:
    """Packets that the gate of the relay's interface dropped."""
    return sum(
        count for gate in report.relay.gates for count in gate.packets.get("drop", {}).values()
    )


def ended(node: Node, name: str, outcome: Outcome) -> Callable[[AgentReport], int]:
    """The number of the kubelet's connections to a pod with this outcome."""

    def count(report: AgentReport) -> int:
        pod = pod_of(report, name)
        return sum(each.outcomes.get(outcome, 0) for each in pod.relayed) if pod else 0

    return count


def report_of(node: Node) -> AgentReport:
    report = node.operator.report()
    assert report is not None
    return report


def wait_for_count(node: Node, what: str, count: Callable[[AgentReport], int], least: int) -> None:
    """Relays report once a second."""
    node.operator.wait_for(f"{least} {what}", lambda report: count(report) >= least)


def relays_targets(node: Node, kind: str, port: int) -> list[str]:
    return [f"{kind},{address},{port}" for address in relay_addresses(node.operator.bpffs).values()]


def test_connect_to_the_relay_from_another_cgroup_is_rejected_and_counted(
    node: Node, intruder: NodeClient
) -> None:
    before = dropped_at_the_pair(report_of(node))
    targets = [*relays_targets(node, "tcp", fleet.HTTP), *relays_targets(node, "tcp", fleet.TCP)]
    assert len(targets) == 8
    assert intruder.probe(targets) == dict.fromkeys(targets, nodeclient.FORBIDDEN)
    assert dropped_at_the_pair(report_of(node)) >= before + len(targets)


def test_addresses_of_the_range_without_a_pod_are_unreachable(
    node: Node, intruder: NodeClient, inside: Inside
) -> None:
    """Within the relay's share its gate drops; beyond it there is no route, not even a default
    route."""
    share, rest = [], []
    for text in (RANGE4, RANGE6):
        first, *others = ipaddress.ip_network(text).subnets(prefixlen_diff=3)
        share.append(f"tcp,{first[200]},{fleet.HTTP}")
        rest.append(f"tcp,{others[-1][200]},{fleet.HTTP}")
    way_out = (
        "link add way-out type veth peer name out",
        "link set way-out up",
        "link set out up",
        "route add 0.0.0.0/0 dev way-out",
        "route add ::/0 dev way-out",
    )
    with links.made("way-out", *way_out):
        found = intruder.probe([*share, *rest])
    expected = dict.fromkeys(share, nodeclient.UNANSWERED)
    assert found == expected | dict.fromkeys(rest, nodeclient.UNREACHABLE)
    assert inside.arrived() == []


@pytest.mark.parametrize("first_packet", syns.FIRST_PACKETS, ids=str)
def test_no_socket_of_another_cgroup_gets_a_packet_to_the_relay(
    node: Node, inside: Inside, first_packet: syns.FirstPacket
) -> None:
    """The pair's gate drops packets that no hook sees. This process is the intruder."""
    before = dropped_at_the_pair(report_of(node))
    tried = 0
    for address in relay_addresses(node.operator.bpffs).values():
        if ipaddress.ip_address(address).version in first_packet.versions:
            begin(first_packet, address)
            tried += 1
    assert tried
    assert inside.arrived() == []
    assert dropped_at_the_pair(report_of(node)) >= before + tried


def begin(first_packet: syns.FirstPacket, address: str) -> None:
    target = syns.Target(address, relays_interface(), fleet.HTTP, fleet.HTTP)
    with contextlib.suppress(PermissionError):
        try:
            first_packet.begin(target)
        except AssertionError as unexpected:
            # From `FirstPacket.begin`: a hook rejected the connect.
            if unexpected.args != (errno.EPERM,):
                raise


def relays_interface() -> str:
    (name,) = relay_interfaces.present().values()
    return name


def test_no_packet_socket_gets_a_packet_to_the_relay(node: Node, inside: Inside) -> None:
    before = dropped_at_the_pair(report_of(node))
    frames_sent = 0
    with links.packet_socket(relays_interface()) as sock:
        for address in map(frames.address, relay_addresses(node.operator.bpffs).values()):
            source = frames.address("198.18.0.1" if address.version == 4 else "fd00:18::1")
            ends = frames.Ends(source, address, port=fleet.HTTP)
            for segment in (
                frames.tcp(ends, frames.SYN),
                frames.tcp(ends, frames.SYN | frames.PSH),
                frames.tcp(ends, frames.ACK, data=b"injected"),
            ):
                with links.drop_is_enobufs():
                    sock.send(frames.packet(ends, frames.TCP, segment))
                frames_sent += 1
    assert inside.arrived() == []
    assert dropped_at_the_pair(report_of(node)) >= before + frames_sent


@pytest.mark.parametrize("class_id", ["", "7040", "7060", "7061", "7067", "7068", "7069"])
def test_no_pod_reaches_another_by_way_of_the_relay(
    node: Node, inside: Inside, class_id: str
) -> None:
    """Packets of a pod are forwarded, like those from outside, so no gate checks their source
    process.

    class_id: a pod with CAP_NET_ADMIN stamps its packets as the host's programs do.
    """
    stranger = node.lab.pods["stranger"]
    if class_id:
        forge_stamp(stranger, class_id)
    before = dropped_at_the_pair(report_of(node))
    addresses = relay_addresses(node.operator.bpffs).values()
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with stranger.open_socket(family, socket.SOCK_STREAM) as sock, pytest.raises(TimeoutError):
            sock.connect((address, fleet.HTTP))
    assert inside.arrived() == []
    assert dropped_at_the_pair(report_of(node)) >= before + len(addresses)
    assert node.fleet.peers() == {}


def forge_stamp(pod: LabPod, class_id: str) -> None:
    """The kernel copies a filter's class id to tc_index."""
    match = f"u32 match u32 0 0 flowid 1:{class_id}"
    for command in (
        "qdisc replace dev eth0 clsact",
        "filter del dev eth0 egress",
        f"filter add dev eth0 egress protocol all {match}",
    ):
        enter = ["nsenter", f"--net={pod.netns.path}", "tc"]
        subprocess.run([*enter, *command.split()], check=True)


def test_kubelet_is_rejected_at_undeclared_ports(node: Node, kubelet: NodeClient) -> None:
    """At the pod's address by its gate, and at the relay's by the relay."""
    bare = node.pods["bare"]
    node.fleet.peers()

    undeclared = bare.targets("tcp", fleet.HTTP)
    before = packets(report_of(node), "bare", "drop")
    assert kubelet.probe(undeclared) == dict.fromkeys(undeclared, nodeclient.FORBIDDEN)
    assert packets(report_of(node), "bare", "drop") >= before + len(undeclared)

    relays = relay_addresses(node.operator.bpffs)
    direct = [f"tcp,{relays[host]},{fleet.HTTP}" for host in (bare.pod.ipv4, bare.pod.ipv6)]
    count = ended(node, "bare", "undeclared")
    before = count(report_of(node))
    assert set(kubelet.probe(direct).values()) == {nodeclient.REFUSED}
    wait_for_count(node, "undeclared", count, before + len(direct))

    assert node.fleet.peers() == {}
    # The pod is reachable: only the port is rejected.
    declared = bare.targets("tcp", fleet.TCP)
    assert kubelet.probe(declared) == dict.fromkeys(declared, nodeclient.OK)


def test_connections_end_with_their_sandbox_and_its_address_is_unused_until_reuse(
    node: Node, kubelet: NodeClient
) -> None:
    old = add(node, "old")
    relays = relay_addresses(node.operator.bpffs)
    targets = old.targets("http", fleet.HTTP)
    for target in targets:
        assert kubelet.hold(target) == [nodeclient.OK]
    assert kubelet.held() == [nodeclient.OK] * len(targets)

    node.remove("old")
    ends = {nodeclient.ENDED, nodeclient.RESET}
    wait_until("kept connections ended", lambda: set(kubelet.held()) <= ends)
    node.settle()

    new = add(node, "new")
    assert (new.pod.ipv4, new.pod.ipv6) == (old.pod.ipv4, old.pod.ipv6)
    assert kubelet.probe(targets) == dict.fromkeys(targets, nodeclient.OK)
    assert node.fleet.peers()["new"] == {new.pod.ipv4, new.pod.ipv6}

    # The relay's addresses of the old pod represent no pod now, and not the new one.
    former = [f"tcp,{relays[host]},{fleet.HTTP}" for host in (old.pod.ipv4, old.pod.ipv6)]
    assert not set(relay_addresses(node.operator.bpffs).values()) & {
        target.split(",")[1] for target in former
    }
    before = report_of(node).relay.unknown_address
    assert set(kubelet.probe(former).values()) == {nodeclient.REFUSED}
    wait_for_count(
        node, "unknown", lambda report: report.relay.unknown_address, before + len(former)
    )
    assert node.fleet.peers() == {}
    node.remove("new")
    node.settle()


def add(node: Node, name: str) -> FleetPod:
    """A pod in strict with an address that other pods had before."""
    made = node.add(name, REUSED_NUMBER, ports=(fleet.HTTP,), probes=WEB_PROBES, mode="strict")
    node.settle()
    node.fleet.peers()
    return made
