"""With Open vSwitch: a packet without a flow goes to ovs-vswitchd, which sends it again without
its socket, its input interface and its stamp.

Each attack is shown to work without the program on the switch's internal port. Flows are removed
before each packet, so that it comes back from ovs-vswitchd; then it is sent again, by its flow.
"""

import asyncio
import contextlib
import dataclasses
import errno
import socket
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from agent.gates.host_devices import programs_for
from agent.lab import lab as labs
from agent.linux import rtnetlink, tunnels
from agent.linux.cgroups import cgroup2_mount
from agent.linux.rtnetlink import Link
from bpf import abi, injectable, loader, map_specs, pins
from bpf.gates import GateConfig, Gates
from bpf.hooks import Hooks
from bpf.host_devices import HostDevicePrograms
from bpf.node_config import NodeConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from probes.netns import netns_cookie
from tests import polling
from tests.kernel import frames, guarded, links, offers, syns, traffic, tunnelled, wire
from tests.kernel.devices import switch as switches
from tests.kernel.guarded import PodState
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.test_bypass_reentry import programs
from tests.kernel.tunnelled import code_of, unprivileged

pytestmark = [pytest.mark.kernel, pytest.mark.file_node]

VERSIONS = pytest.mark.parametrize("version", [4, 6])
MODES = pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.STRICT], ids=["enforce", "strict"])
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
SERVICE_MAC = "02:00:00:00:00:80"
SWITCH_PASSED = (Verdict.PASS, Reason.SWITCH)
ADMITTED_PORT = 8443

FIRST_PACKETS = {packet.name: packet for packet in syns.FIRST_PACKETS}


@dataclasses.dataclass(slots=True)
class Switched:
    """A pod and its neighbour behind the switch, and the node's programs."""

    watched: PodState
    switch: switches.Switch
    lab: labs.Lab
    loaded: loader.Loaded
    gates: Gates
    devices: HostDevicePrograms
    moved: Counter[tuple[Verdict, Reason]] = dataclasses.field(default_factory=Counter)

    def guard(self) -> None:
        """As the agent does where it finds the switch."""
        found = self.found_links()
        gated = {pod.ifindex for pod in (self.watched.pod, self.watched.neighbour)}
        needed = programs_for(found, gated=gated, enforced=gated)
        assert links.index_of(switches.NAME) in needed.devices
        self.devices.ensure_devices(set(needed.devices))
        self.devices.ensure_hand_made(set(needed.hand_made))
        assert any(link.kind == "openvswitch" for link in found)
        NodeConfig(self.loaded).set_ovs(is_there=True)

    def found_links(self) -> list[Link]:
        return asyncio.run(rtnetlink.read())

    def target(self, version: int) -> syns.Target:
        pod = traffic.address(self.watched.pod, version)
        return syns.Target(pod, switches.NAME, guarded.TCP_PORT, guarded.UDP_PORT)

    def datagram(self, version: int, mac: bytes) -> bytes:
        ends = frames.Ends(
            frames.address(syns.STRANGER[version]),
            frames.address(traffic.address(self.watched.pod, version)),
            mac,
            port=guarded.UDP_PORT,
        )
        return frames.packet(ends, frames.UDP, frames.udp(ends, b"by-the-switch"))

    def counted(self) -> Counter[tuple[Verdict, Reason]]:
        """Of the pod's gate since the programs are there."""
        self.moved.update(self.watched.moved())
        return self.moved

    def dropped(self) -> int:
        return sum(n for (verdict, _), n in self.counted().items() if verdict is Verdict.DROP)


@pytest.fixture
def switched(
    switch: switches.Switch,
    lab: labs.Lab,
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
) -> Iterator[Switched]:
    web, neighbour = lab.add_pod("web", 1), lab.add_pod("neighbour", 2)
    switch.connect(web)
    switch.connect(neighbour)
    admitted = Rule(SourceKind.ANY, frames.TCP, ADMITTED_PORT, ADMITTED_PORT)
    with (
        guarded.guarded(gates, web, neighbour, admitted) as watched,
        programs(loaded, installation) as devices,
    ):
        yield Switched(watched, switch, lab, loaded, gates, devices)
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


Attack = Callable[[Switched, int], contextlib.AbstractContextManager[Callable[[], None]]]


def by_socket(name: str) -> Attack:
    @contextlib.contextmanager
    def attack(switched: Switched, version: int) -> Iterator[Callable[[], None]]:
        yield lambda: FIRST_PACKETS[name].begin(switched.target(version))

    return attack


@contextlib.contextmanager
def by_packet_socket(switched: Switched, version: int) -> Iterator[Callable[[], None]]:
    with links.packet_socket(switches.NAME) as sock:
        yield lambda: wire.send(sock, switched.datagram(version, switched.watched.mac))


@contextlib.contextmanager
def by_loopback(switched: Switched, version: int) -> Iterator[Callable[[], None]]:
    """The node receives it, and forwards it by the internal port: it has no socket there."""
    with links.packet_socket("lo") as sock:
        yield lambda: wire.send(sock, switched.datagram(version, bytes(6)))


@contextlib.contextmanager
def by_tun(switched: Switched, version: int) -> Iterator[Callable[[], None]]:
    """The same with an interface whose packets a process makes."""
    with links.tun() as (name, descriptor):
        marks, ifindex = injectable.InjectableMap(switched.loaded), links.index_of(name)
        marks.mark(ifindex, is_node_sent=True)
        try:
            with open(descriptor, "wb", buffering=0, closefd=False) as tun:
                packet = switched.datagram(version, bytes(6))[14:]

                def send() -> None:
                    assert tun.write(packet) == len(packet)

                yield send
        finally:
            marks.mark(ifindex, is_node_sent=False)


@contextlib.contextmanager
def by_service(switched: Switched, version: int) -> Iterator[Callable[[], None]]:
    """The switch translates the address, so the internal port sees no address of a pod."""
    field = {4: "ip,nw_dst={}", 6: "ipv6,ipv6_dst={}"}[version].format(SERVICE[version])
    name = {4: "ip_dst", 6: "ipv6_dst"}[version]
    pod = traffic.address(switched.watched.pod, version)
    mac = switched.watched.mac.hex(":")
    actions = f"set_field:{pod}->{name},set_field:{mac}->eth_dst,NORMAL"
    flow = f"priority=9,in_port=LOCAL,{field},actions={actions}"
    switched.switch.add_flow(flow)
    target = dataclasses.replace(switched.target(version), address=SERVICE[version])
    with links.route(SERVICE[version], switches.NAME):
        links.ip(f"neigh add {SERVICE[version]} lladdr {SERVICE_MAC} dev {switches.NAME}")
        yield lambda: FIRST_PACKETS["udp"].begin(target)


@contextlib.contextmanager
def by_pod(switched: Switched, version: int) -> Iterator[Callable[[], None]]:
    """A pod in audit translates the address and sends the packet back to the switch."""
    pod = switched.lab.add_pod("bouncer", 7)
    switched.switch.connect(pod)
    switched.gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    start_reply_table(switched.gates, pod.ifindex)
    links.let_forward(pod)
    family = {4: "ip", 6: "ip6"}[version]
    to = traffic.address(switched.watched.pod, version)
    body = (
        f"chain in {{ type nat hook prerouting priority -100;\nmeta l4proto udp dnat to {to}\n}}\n"
    )
    target = dataclasses.replace(switched.target(version), address=traffic.address(pod, version))
    with pod.listen(1), links.table_inside(pod, family, body):
        assert traffic.node_reaches(pod, version, 1)
        yield lambda: FIRST_PACKETS["udp"].begin(target)


ATTACKS = pytest.mark.parametrize(
    "attack",
    [
        *(pytest.param(by_socket(name), id=name) for name in ("tcp", "udp", "raw-udp-spoofed")),
        *(
            pytest.param(attack, id=attack.__name__)
            for attack in (by_packet_socket, by_loopback, by_tun, by_service, by_pod)
        ),
    ],
)


@ATTACKS
@MODES
@VERSIONS
def test_no_packet_of_the_host_reaches_a_pod_by_the_switch(
    switched: Switched, attack: Attack, mode: Mode, version: int
) -> None:
    watched = switched.watched
    with attack(switched, version) as send:
        # Once, so that none is still on its way when the gate enforces.
        switched.switch.forget_flows()
        send()
        polling.wait_until("the path works", watched.arrived)
        watched.set_mode(mode)
        switched.guard()
        for is_in_cache in (False, True):
            if not is_in_cache:
                switched.switch.forget_flows()
            send_and_wait(switched, send)
            assert watched.arrived() == []
    assert SWITCH_PASSED not in switched.counted()


def send_and_wait(switched: Switched, send: Callable[[], None]) -> None:
    before = switched.dropped()
    send()
    polling.wait_until("the packet is dropped", lambda: switched.dropped() > before)


@MODES
@VERSIONS
def test_pods_and_the_host_talk_by_the_switch(switched: Switched, mode: Mode, version: int) -> None:
    """Every flow's first packet comes back from ovs-vswitchd."""
    web, neighbour = switched.watched.pod, switched.watched.neighbour
    switched.watched.set_mode(mode)
    switched.guard()
    with web.listen(8081) as listening:
        switched.switch.forget_flows()
        traffic.pod_connects(neighbour, traffic.address(web, version), version, listening)
        polling.wait_until("forwarded", lambda: switched.counted()[SWITCH_PASSED])
    with web.listen(ADMITTED_PORT):
        switched.switch.forget_flows()
        assert traffic.node_reaches(web, version, ADMITTED_PORT)
    with traffic.listen_on_node(8080) as listening:
        switched.switch.forget_flows()
        traffic.pod_connects(web, traffic.NODE[version], version, listening)
    with contextlib.closing(syns.datagram(traffic.family(version))) as server:
        server.settimeout(traffic.LIMIT_SECONDS)
        server.bind((traffic.NODE[version], 5353))
        with web.open_socket(traffic.family(version), socket.SOCK_DGRAM) as client:
            client.settimeout(traffic.LIMIT_SECONDS)
            client.sendto(b"question", (traffic.NODE[version], 5353))
            question, whence = server.recvfrom(100)
            switched.switch.forget_flows()
            server.sendto(question, whence)
            assert client.recv(100) == b"question"
    assert switched.dropped() == 0, switched.counted()


def test_path_test_finds_the_gate_behind_the_switch(switched: Switched) -> None:
    switched.watched.set_mode(Mode.ENFORCE)
    switched.guard()
    switched.switch.forget_flows()
    target = dataclasses.replace(switched.target(4), tcp_port=0)
    FIRST_PACKETS["raw-syn-spoofed"].begin(target)
    counted = (Verdict.DROP, Reason.PATH_TEST)
    polling.wait_until("the gate sees it", lambda: switched.counted()[counted])


@VERSIONS
def test_datagram_for_a_tunnel_port_of_the_switch_is_rejected(
    switched: Switched, loaded: loader.Loaded, installation: pins.Pins, version: int
) -> None:
    offers.need_netns_cookie()
    mount = cgroup2_mount()
    assert mount is not None
    key = f"options:key={tunnelled.NETWORK}"
    switched.switch.daemons.configure(
        *("add-port", switches.NAME, "vxlan-pg", "--", "set", "interface", "vxlan-pg"),
        *("type=vxlan", "options:remote_ip=flow", key),
    )
    inner = switched.datagram(version, switched.watched.mac)

    def send() -> int:
        to = (traffic.NODE[version], tunnelled.VXLAN_PORT)
        with unprivileged(), syns.datagram(traffic.family(version)) as sock:
            return code_of(lambda: sock.sendto(tunnelled.wrap(inner), to))

    def arrives() -> bool:
        return send() == 0 and bool(switched.watched.arrived())

    switched.watched.set_mode(Mode.ENFORCE)
    polling.wait_until("the path works", arrives)
    found = tunnels.find_tunnels(switched.found_links())
    assert found.udp_ports == {tunnelled.VXLAN_PORT}
    NodeConfig(loaded).set_netns(netns_cookie())
    hooks = Hooks(loaded, installation, mount)
    hooks.attach()
    try:
        NodeConfig(loaded).set_tunnel_ports(found.udp_ports)
        assert send() == errno.EPERM
    finally:
        hooks.detach()
