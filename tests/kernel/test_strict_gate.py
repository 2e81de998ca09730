"""The gate of a pod in strict drops the kubelet's own flows that a serving relay does not proxy.

The test itself is the kubelet: every process of its cgroup is. What it sends is repeated without a
relay, when the gate admits it as in enforce, which shows that the attempt itself works.
"""

import contextlib
import dataclasses
import socket
from collections.abc import Iterable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import loader, pins
from bpf.attachment import Attachment
from bpf.gates import GateConfig, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.redirect import Redirect
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, guarded, links, redirecting, syns, traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.counting import Counting
from tests.kernel.guarded import PodState
from tests.kernel.redirecting import PORT, Scene
from tests.kernel.syns import FirstPacket, Target

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
KUBELET = Rule(SourceKind.KUBELET, socket.IPPROTO_TCP)
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
STRICT_DROPPED = (Verdict.DROP, Reason.STRICT)
ADMITTED = (Verdict.PASS, Reason.PROBE)
NODE_PORT = 30080


def _bound_mptcp(target: Target) -> None:
    with syns.stream(target.family, syns.IPPROTO_MPTCP) as sock:
        name = target.interface.encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        sock.connect_ex((target.address, target.tcp_port))


# What opens a TCP connection, and those whose connect(2) no hook redirects.
BOUND_MPTCP = FirstPacket("mptcp-bound-to-interface", _bound_mptcp)
TCP_PACKETS = [
    (first_packet, version)
    for first_packet in (*syns.FIRST_PACKETS, BOUND_MPTCP)
    if first_packet.name.startswith(("tcp", "mptcp", "raw-syn"))
    for version in first_packet.versions
]
(TCP,) = (each for each in syns.FIRST_PACKETS if each.name == "tcp")
NOT_REDIRECTED = {
    *("tcp-bound-to-interface", "mptcp-bound-to-interface"),
    *("raw-syn", "raw-syn-with-data", "raw-syn-spoofed"),
}


@pytest.fixture
def redirect(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[Redirect]:
    """Of a relay that serves a kubelet, which is the test itself."""
    with (
        redirecting.kubelet_config(loaded),
        redirecting.engaged(loaded, installation) as made,
    ):
        yield made


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A pod in strict, and the relay that serves it: another pod, which has the relay's address."""

    watched: PodState
    relay: labs.LabPod
    redirect: Redirect

    def publish(
        self,
        ports: Iterable[int] = (0,),
        *,
        relay: labs.LabPod | None = None,
        admits_translated: bool = False,
    ) -> None:
        relay = relay or self.relay
        for own, other in zip(relay.addresses, self.watched.pod.addresses, strict=True):
            self.redirect.publish(
                own, other, ports, relay.ifindex, admits_translated=admits_translated
            )

    def withdraw(self, ports: Iterable[int] = (0,)) -> None:
        for own, other in zip(self.relay.addresses, self.watched.pod.addresses, strict=True):
            self.redirect.withdraw(own, other, ports)

    def pause(self) -> None:
        """As a relay that is full, or hung for 300 ms."""
        self.redirect.pause()

    def target(self, version: int) -> Target:
        pod = self.watched.pod
        interface = labs.BRIDGE if pod.is_bridged else pod.interface
        return Target(traffic.address(pod, version), interface, guarded.TCP_PORT, guarded.UDP_PORT)


@pytest.fixture(
    params=[(False, Attachment.CLSACT), (True, Attachment.CLSACT), (False, Attachment.TCX)],
    ids=["routed", "bridged", "tcx"],
)
def served(
    request: pytest.FixtureRequest,
    lab: labs.Lab,
    make_gates: MakeGates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    redirect: Redirect,
) -> Iterator[Served]:
    is_bridged, attachment = request.param
    gates = make_gates(attachment)
    pod = lab.add_pod("web", 1, bridged=is_bridged)
    neighbour = lab.add_pod("neighbour", 2, bridged=is_bridged)
    relay = lab.add_pod("relay", 3)
    with contextlib.ExitStack() as stack:
        if is_bridged:
            devices = HostDevicePrograms(loaded, installation, attachment)
            stack.enter_context(contextlib.closing(devices))
            devices.ensure_bridges({links.index_of(labs.BRIDGE)})
            stack.callback(devices.ensure_bridges, set())
        watched = stack.enter_context(guarded.guarded(gates, pod, neighbour, KUBELET))
        made = Served(watched, relay, redirect)
        made.publish()
        watched.set_mode(Mode.STRICT)
        yield made


@pytest.mark.parametrize(("first_packet", "version"), TCP_PACKETS, ids=str)
def test_no_first_packet_of_the_kubelet_reaches_the_pod_while_a_relay_serves(
    served: Served, first_packet: FirstPacket, version: int
) -> None:
    target = served.target(version)
    first_packet.begin(target)
    assert served.watched.arrived() == []
    dropped = {STRICT_DROPPED} if first_packet.name in NOT_REDIRECTED else set()
    assert served.watched.moved().keys() == dropped

    served.pause()
    first_packet.begin(target)
    assert served.watched.arrived()
    assert ADMITTED in served.watched.moved()


def is_admitted(served: Served, name: str, version: int) -> bool:
    """Whether this first packet of the kubelet reaches the pod; otherwise it is counted."""
    first_packet = next(each for each in syns.FIRST_PACKETS if each.name == name)
    first_packet.begin(served.target(version))
    has_arrived = bool(served.watched.arrived())
    moved = served.watched.moved()
    assert moved.keys() >= {ADMITTED if has_arrived else STRICT_DROPPED}
    return has_arrived


@VERSIONS
def test_packet_socket_of_the_kubelet_opens_nothing(served: Served, version: int) -> None:
    pod = served.watched.pod
    target = served.target(version)
    ends = target.ends(target.tcp_port)
    frame = frames.packet(ends, frames.TCP, frames.tcp(ends, frames.SYN))

    def send() -> bool:
        with links.packet_socket(pod.interface) as sock, links.drop_is_enobufs():
            sock.send(frame)
        return bool(served.watched.arrived())

    assert not send()
    assert served.watched.moved() == {STRICT_DROPPED: 1}
    served.pause()
    assert send()


@contextlib.contextmanager
def service(pod: Target) -> Iterator[None]:
    """A service's address, and a port of the node, which are translated to the pod's."""
    family, to = ("ip", pod.address) if pod.version == 4 else ("ip6", f"[{pod.address}]")
    rules = "\n".join(
        f"{family} daddr {address} tcp dport {port} dnat to {to}:{pod.tcp_port}"
        for address, port in (
            (SERVICE[pod.version], pod.tcp_port),
            (traffic.NODE[pod.version], NODE_PORT),
        )
    )
    chain = f"chain output {{ type nat hook output priority -100;\n{rules}\n}}"
    with links.table(family, chain), links.route(SERVICE[pod.version], "lo"):
        yield


@VERSIONS
def test_connect_to_an_address_that_is_translated_to_the_pod_s_is_dropped(
    served: Served, version: int
) -> None:
    pod = served.target(version)
    ways = [
        dataclasses.replace(pod, address=SERVICE[version]),
        dataclasses.replace(pod, address=traffic.NODE[version], tcp_port=NODE_PORT),
    ]
    with service(pod):
        for way in ways:
            TCP.begin(way)
            assert served.watched.arrived() == []
            assert served.watched.moved() == {STRICT_DROPPED: 1}
        served.pause()
        for way in ways:
            TCP.begin(way)
            assert served.watched.arrived()


@VERSIONS
def test_pod_whose_probe_names_a_host_is_reached_by_a_translated_address_only(
    served: Served, version: int
) -> None:
    pod = served.target(version)
    served.publish(admits_translated=True)
    with service(pod):
        TCP.begin(dataclasses.replace(pod, address=SERVICE[version]))
        assert served.watched.arrived()
    assert not is_admitted(served, "raw-syn", version)
    assert not is_admitted(served, "tcp-bound-to-interface", version)


@VERSIONS
def test_ports_that_no_relay_proxies_stay_admitted(served: Served, version: int) -> None:
    """As those of a pod whose address another pod has, too."""
    served.withdraw()
    served.publish([guarded.TCP_PORT + 1])
    assert is_admitted(served, "raw-syn", version)
    assert is_admitted(served, "tcp-bound-to-interface", version)
    assert is_admitted(served, "tcp", version)
    served.publish([guarded.TCP_PORT])
    assert not is_admitted(served, "raw-syn", version)
    assert not is_admitted(served, "tcp-bound-to-interface", version)


@VERSIONS
def test_pod_in_enforce_admits_the_kubelet_beside_the_relay(served: Served, version: int) -> None:
    served.watched.set_mode(Mode.ENFORCE)
    assert is_admitted(served, "raw-syn", version)
    assert is_admitted(served, "tcp-bound-to-interface", version)


@VERSIONS
def test_rule_for_the_kubelet_s_own_cgroup_admits_what_bypasses_the_relay(
    served: Served, gates: Gates, version: int
) -> None:
    pod = served.watched.pod
    own = Rule(SourceKind.CGROUP, socket.IPPROTO_TCP, cgroup=redirecting.own_cgroup())
    end = Rule(SourceKind.ANY, socket.IPPROTO_UDP, guarded.END_PORT, guarded.END_PORT)
    gates.configure(pod.ifindex, GateConfig(Mode.STRICT, pod.addresses, (KUBELET, own, end)))
    syns.FIRST_PACKETS[1].begin(served.target(version))
    assert served.watched.arrived()


@VERSIONS
def test_without_fallback_the_kubelet_is_never_admitted(
    served: Served, gates: Gates, version: int
) -> None:
    pod = served.watched.pod
    end = Rule(SourceKind.ANY, socket.IPPROTO_UDP, guarded.END_PORT, guarded.END_PORT)
    gate = GateConfig(Mode.STRICT, pod.addresses, (KUBELET, end), without_fallback=True)
    gates.configure(pod.ifindex, gate)
    served.pause()
    names = ("tcp", "tcp-bound-to-interface", "raw-syn")
    assert not any(is_admitted(served, name, version) for name in names)
    served.withdraw()
    assert not any(is_admitted(served, name, version) for name in names)
    gates.configure(pod.ifindex, dataclasses.replace(gate, mode=Mode.ENFORCE))
    assert all(is_admitted(served, name, version) for name in names)


@VERSIONS
def test_handover_to_another_relay_leaves_no_gap(
    served: Served, installation: pins.Pins, version: int
) -> None:
    """The first relay withdraws what is still its own, and ends, while the other one serves."""
    successor = served.watched.neighbour
    with redirecting.engaged_child(installation):
        assert not is_admitted(served, "raw-syn", version)
        served.publish(relay=successor)
        assert not is_admitted(served, "raw-syn", version)
        served.redirect.disengage()
        served.withdraw()
        assert not is_admitted(served, "raw-syn", version)
        assert not is_admitted(served, "tcp-bound-to-interface", version)


@pytest.fixture
def scene(lab: labs.Lab, redirect: Redirect, gates: Gates) -> Iterator[Scene]:
    """A pod in strict, whose connections a relay proxies until its hooks are disengaged."""
    with redirecting.scene(lab) as made:
        made.publish(redirect)
        gates.install(made.pod.ifindex, strict_gate(made.pod))
        yield made


def strict_gate(pod: labs.LabPod) -> GateConfig:
    return GateConfig(Mode.STRICT, pod.addresses, (KUBELET,))


@VERSIONS
def test_when_a_relay_is_killed_the_next_connect_passes_at_once(
    scene: Scene, redirect: Redirect, gates: Gates, installation: pins.Pins, version: int
) -> None:
    """Although its last heartbeat is fresh."""
    redirect.disengage()
    counting = Counting(gates, scene.pod.ifindex)
    for _ in range(5):
        with redirecting.engaged_child(installation) as relay:
            assert scene.reached_from_node(version) == "relay"
            redirecting.kill(relay)
            assert scene.reached_from_node(version) == "pod"
    assert counting.moved()[ADMITTED] == 5


@VERSIONS
def test_connect_from_before_the_relay_serves_is_retransmitted_to_the_pod(
    scene: Scene, redirect: Redirect, gates: Gates, version: int
) -> None:
    redirect.disengage()
    gates.configure(scene.pod.ifindex, GateConfig(Mode.STRICT, scene.pod.addresses))
    with syns.stream(traffic.family(version)) as sock:
        sock.connect_ex((traffic.address(scene.pod, version), PORT))
        redirect.engage(redirecting.root_cgroup())
        assert scene.reached_from_node(version) == "relay"
        gates.configure(scene.pod.ifindex, strict_gate(scene.pod))
        assert scene.who_has_it() == "pod"
