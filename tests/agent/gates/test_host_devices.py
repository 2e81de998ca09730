"""Host devices on which packets would bypass a gate: they are found, and programs follow."""

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar

import pytest
import structlog.testing

from agent.gates.host_devices import DevicePrograms, HostDevices, programs_for
from agent.linux import udp_listeners
from agent.linux.rtnetlink import Link
from agent.linux.tunnels import TunnelPorts, find_tunnels
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf import program_specs
from bpf.errors import AttachError

T = TypeVar("T")


class _GateWorker:
    """The gate worker with the methods of its parts that `HostDevices` calls."""

    def __init__(self) -> None:
        self.config = self.host_devices = self
        self.switches: list[bool] = []
        self.enforced: list[bool] = []
        self.bridges: list[set[int]] = []
        self.devices: list[set[int]] = []
        self.uplinks: list[set[int]] = []
        self.bare_devices: list[set[int]] = []
        self.hand_made: list[set[int]] = []
        self.spoofed: list[set[int]] = []
        self.are_all = True
        self.tunnels: list[tuple[frozenset[int], bool]] = []
        self.unknown_detached_after: list[list[set[int]]] = []
        """The calls of `ensure_uplinks` before each call of `detach_unknown`."""
        self.rejects = self.rejects_detach = False
        self.unsettled = 0
        self.calms: list[bool] = []
        self.is_attached = True
        self.deferred: list[str] = []
        """Programs that were loaded when they were needed, or afterwards."""
        self.all_loaded = asyncio.Event()

    async def load_deferred(self, names: Collection[str]) -> None:
        await asyncio.sleep(0)
        self.deferred += [name for name in names if name not in self.deferred]
        if len(self.deferred) == len(program_specs.DEFERRABLE):
            self.all_loaded.set()

    async def run(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        return function(*args, **kwargs)

    def set_ovs(self, *, is_there: bool) -> None:
        self.switches.append(is_there)

    def set_enforced(self, *, has_any: bool) -> None:
        self.enforced.append(has_any)

    def set_tunnel_ports(self, udp_ports: frozenset[int]) -> None:
        self.tunnels[-1] = (udp_ports, self.tunnels[-1][1])

    def ensure_bridges(self, ifindexes: set[int], *, are_all: bool) -> None:
        if self.rejects:
            raise AttachError("guarding interface 5: no")
        assert not ifindexes or program_specs.BRIDGE_GATE in self.deferred
        self.are_all = are_all
        self.bridges.append(ifindexes)

    def ensure_devices(self, ifindexes: set[int], *, are_all: bool) -> None:
        assert not ifindexes or program_specs.DEVICE_GATE in self.deferred
        self.devices.append(ifindexes)

    def ensure_uplinks(self, ifindexes: set[int], *, are_all: bool) -> None:
        assert not ifindexes or program_specs.UPLINK_GATE in self.deferred
        self.uplinks.append(ifindexes)

    def ensure_bare_devices(self, ifindexes: set[int], *, are_all: bool) -> None:
        assert not ifindexes or program_specs.BARE_DEVICE_GATE in self.deferred
        self.bare_devices.append(ifindexes)

    def ensure_hand_made(self, ifindexes: set[int], *, are_all: bool) -> None:
        self.hand_made.append(ifindexes)

    def ensure_spoofed(self, ifindexes: set[int], *, are_all: bool) -> None:
        self.spoofed.append(ifindexes)

    def ensure_tunnels(self, *, are_guarded: bool) -> None:
        self.tunnels.append((frozenset(), are_guarded))

    def detach_unknown(self) -> list[str]:
        if self.rejects_detach:
            raise AttachError("detaching from interface 5: no")
        self.unknown_detached_after.append(list(self.uplinks))
        return ["judge_on_bridge"]

    def settle(self, *, is_calm: bool) -> bool:
        self.calms.append(is_calm)
        self.unsettled -= is_calm and self.unsettled > 0
        return not self.unsettled


def make(gate_worker: _GateWorker, store: PodStore) -> HostDevices:
    return HostDevices(
        gate_worker,  # type: ignore[arg-type]
        store,
    )


@pytest.fixture
def store() -> PodStore:
    """Interface 5 is gated."""
    made = PodStore(Conditions())
    made.relay_gates[5] = "veth5"
    made.synced.set()
    return made


def test_a_tunnel_that_is_up_has_its_port_protected() -> None:
    links = [
        Link(2, "vxlan2", kind="vxlan", udp_ports=frozenset({8472})),
        Link(3, "geneve3", kind="geneve", udp_ports=frozenset({6081})),
        Link(4, "vxlan4", kind="vxlan", udp_ports=frozenset({4789}), flags=0),
        Link(5, "veth5", kind="veth"),
        Link(6, "eth6"),
    ]
    assert find_tunnels(links) == TunnelPorts(frozenset({8472, 6081}), has_any=True)


@pytest.mark.parametrize("kind", ["ipip", "gre", "sit", "ip6tnl"])
def test_a_tunnel_without_ports_counts_too(kind: str) -> None:
    assert find_tunnels([Link(2, "tunnel0", kind=kind)]) == TunnelPorts(frozenset(), has_any=True)
    assert find_tunnels([Link(2, "tunnel0", kind=kind, flags=0)]) == TunnelPorts(
        frozenset(), has_any=False
    )


def test_all_bridges_count_and_those_of_enforced_pods_drop_what_they_cannot_read() -> None:
    links = [
        Link(2, "bridge2", kind="bridge"),
        Link(3, "bridge3", kind="bridge"),
        Link(4, "vrf4", kind="vrf"),
        Link(5, "veth5", kind="veth", peer=2, peer_nsid=0, master=2),
        Link(6, "veth6", kind="veth", peer=2, peer_nsid=1, master=3),
        Link(7, "veth7", kind="veth", peer=2, peer_nsid=2, master=4),
        Link(8, "bridge8", kind="bridge"),
        Link(9, "veth9", kind="veth", peer=2, peer_nsid=3, master=8),
    ]
    needed = programs_for(links, gated={5, 7, 9}, enforced={5, 7})
    assert needed.bridges == {2}
    assert needed.devices == {3, 8}


def test_programs_are_where_the_host_s_packets_leave_and_may_come_in_again() -> None:
    links = [
        Link(1, "lo", flags=9, is_ethernet=False),
        Link(2, "eth2"),
        Link(3, "eth2.7", kind="vlan", peer=2),
        Link(4, "bond4", kind="bond"),
        Link(5, "podgate-veth", kind="veth", peer=2, peer_nsid=0),
        Link(6, "off-pod", kind="veth", peer=2, peer_nsid=1),
        Link(7, "container", kind="veth", peer=2, peer_nsid=2),
        Link(8, "inner8", kind="veth", peer=9),
        Link(9, "inner9", kind="veth", peer=8),
        Link(10, "macvlan10", kind="macvlan", peer=2),
        Link(11, "ifb11", kind="ifb"),
        Link(12, "wg12", kind="wireguard", is_ethernet=False),
        Link(13, "ipip13", kind="ipip", is_ethernet=False),
        Link(14, "ib14", is_ethernet=False),
        Link(15, "ovs15", kind="openvswitch"),
        Link(16, "kind16", kind="veth", peer=3, peer_nsid=3),
        Link(18, "macvlan18", kind="macvlan", peer=3, peer_nsid=3),
        Link(17, "tun17", kind="tun", is_ethernet=False),
        Link(19, "tap19", kind="tun", is_tap=True),
        Link(20, "flannel20", kind="tun", is_ethernet=False),
        Link(21, "tap21", kind="tun", is_tap=True),
        Link(22, "guest22", kind="tun", is_tap=True, master=23),
        Link(23, "bridge23", kind="bridge"),
        Link(24, "podgate-relay0", kind="veth", peer=2, peer_nsid=4),
        Link(25, "dummy25", kind="dummy"),
        Link(26, "veth26", kind="veth", peer=27),
    ]
    needed = programs_for(
        links, gated={5}, enforced={5}, ungated={6}, uplinks={16, 12, 24, 26}, tuns={17, 19}
    )
    assert needed == DevicePrograms(
        devices=frozenset({3, 8, 9, 10, 11, 15, 19, 21, 23, 26}),
        uplinks=frozenset({2, 16, 18}),
        bare_devices=frozenset({12, 13, 14, 17, 20}),
        hand_made=frozenset({1, 6}),
        tuns=frozenset({17, 19}),
    )


async def test_the_kernel_gets_changes_only(store: PodStore) -> None:
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, store)
    links = [Link(2, "bridge2", kind="bridge"), Link(5, "veth5", kind="veth", master=2)]
    await host_devices.ensure(links)
    await host_devices.ensure(links)
    assert gate_worker.bridges == [{2}]
    assert gate_worker.devices == gate_worker.hand_made == [set()]
    assert gate_worker.tunnels == [(frozenset(), False)]
    store.relay_gates.clear()
    await host_devices.ensure(
        [*links, Link(9, "vxlan9", kind="vxlan", udp_ports=frozenset({8472}))]
    )
    assert gate_worker.bridges == [{2}, set()]
    assert gate_worker.tunnels[1:] == [(frozenset({8472}), True)]


async def test_programs_that_no_device_needs_are_loaded_once_the_pods_are_gated(
    store: PodStore,
) -> None:
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, store)
    store.synced.clear()
    await host_devices.ensure([Link(3, "ipip3", kind="ipip", is_ethernet=False)])
    running = asyncio.create_task(host_devices.run())
    await asyncio.sleep(0)
    assert gate_worker.deferred == [program_specs.BARE_DEVICE_GATE]
    store.synced.set()
    await gate_worker.all_loaded.wait()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()


async def test_no_bridge_is_released_before_all_pods_are_synced(store: PodStore) -> None:
    """Programs of the previous run stay on their bridges until then."""
    gate_worker = _GateWorker()
    store.synced.clear()
    host_devices = make(gate_worker, store)
    links = [Link(2, "bridge2", kind="bridge"), Link(5, "veth5", kind="veth", master=2)]
    await host_devices.ensure(links)
    assert (gate_worker.bridges, gate_worker.are_all) == ([{2}], False)
    store.synced.set()
    await host_devices.ensure(links)
    assert (gate_worker.bridges, gate_worker.are_all) == ([{2}, {2}], True)


async def test_programs_of_other_versions_are_detached_once_and_after_our_own(
    store: PodStore,
) -> None:
    gate_worker = _GateWorker()
    store.synced.clear()
    host_devices = make(gate_worker, store)
    uplink = Link(2, "eth2")
    await host_devices.ensure([uplink])
    assert gate_worker.unknown_detached_after == []
    store.synced.set()
    with structlog.testing.capture_logs() as lines:
        for links in ([uplink], [uplink], [uplink, Link(3, "eth3")]):
            await host_devices.ensure(links)
    assert gate_worker.unknown_detached_after == [[{2}, {2}]]
    logged = [line for line in lines if line["event"] is Event.UNKNOWN_PROGRAMS_DETACHED]
    assert [line["programs"] for line in logged] == [["judge_on_bridge"]]


async def test_programs_of_other_versions_stay_while_a_pod_waits_for_its_gate(
    store: PodStore,
) -> None:
    """One of them may be the pod's gate."""
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, store)
    store.set_pod(Pod(uid="1", namespace="demo", name="web"))
    await host_devices.ensure([])
    assert gate_worker.unknown_detached_after == []
    gate_worker.is_attached = False
    await host_devices.ensure([])
    assert gate_worker.unknown_detached_after == [[set()]]


async def test_programs_attached_in_a_hurry_are_settled_when_no_more_interfaces_come(
    store: PodStore,
) -> None:
    gate_worker = _GateWorker()
    gate_worker.unsettled = 2
    host_devices = make(gate_worker, store)
    links = [Link(2, "eth2")]
    assert not await host_devices.ensure(links)
    assert not await host_devices.ensure(links)
    links.append(Link(3, "eth3"))
    assert not await host_devices.ensure(links)
    assert await host_devices.ensure(links)
    assert gate_worker.calms == [False, True, False, True]


async def test_a_failed_detach_is_tried_again(store: PodStore) -> None:
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, store)
    gate_worker.rejects_detach = True
    assert not await host_devices.ensure([])
    gate_worker.rejects_detach = False
    assert await host_devices.ensure([])
    assert len(gate_worker.unknown_detached_after) == 1


async def test_a_failed_attach_is_tried_again(store: PodStore) -> None:
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, store)
    links = [Link(2, "bridge2", kind="bridge"), Link(5, "veth5", kind="veth", master=2)]
    gate_worker.rejects = True
    await host_devices.ensure(links)
    gate_worker.rejects = False
    await host_devices.ensure(links)
    assert gate_worker.bridges == [{2}]


async def test_problem_is_logged_once_and_again_after_it_was_over(store: PodStore) -> None:
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, store)
    with structlog.testing.capture_logs() as lines:
        for gate_worker.rejects in (True, True, False, True):
            links = [Link(2 + len(gate_worker.bridges), "bridge", kind="bridge")]
            links.append(Link(5, "veth5", kind="veth", master=links[0].index))
            await host_devices.ensure(links)
    failed = [line["error"] for line in lines if line["event"] is Event.HOST_DEVICES_NOT_PROTECTED]
    assert failed == ["guarding interface 5: no"] * 2


async def test_too_many_tunnel_ports_are_not_tried_again_and_again(
    store: PodStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(udp_ports: frozenset[int]) -> None:
        raise ValueError("17 ports of tunnels")

    gate_worker = _GateWorker()
    monkeypatch.setattr(gate_worker, "set_tunnel_ports", reject)
    assert await make(gate_worker, store).ensure([])


@pytest.mark.parametrize("kind", ["ppp", "vxlan", None])
async def test_sockets_of_ppp_are_read_where_there_is_such_an_interface(
    store: PodStore, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    reads: list[bool] = []

    def read(*, has_ppp: bool) -> TunnelPorts:
        reads.append(has_ppp)
        return TunnelPorts(frozenset({1701}), has_any=True)

    monkeypatch.setattr(udp_listeners, "read", read)
    links = [Link(2, "eth2"), *([Link(3, "ppp3", kind=kind)] if kind else [])]
    gate_worker = _GateWorker()
    await make(gate_worker, store).ensure(links)
    assert reads == [kind == "ppp"]
    assert gate_worker.tunnels == [(frozenset({1701}), True)]


@pytest.mark.parametrize(
    ("links", "has_programs"),
    [
        ([], False),
        ([Link(7, "veth7", kind="veth", peer=2, peer_nsid=1)], False),
        ([Link(2, "eth2")], True),
        ([Link(1, "lo", flags=9, is_ethernet=False)], True),
        ([Link(5, "ipip5", kind="ipip")], True),
    ],
    ids=["none", "another namespace's", "uplink", "loopback", "tunnel of a pod"],
)
async def test_programs_remain_while_a_device_needs_one(
    store: PodStore, links: list[Link], has_programs: bool
) -> None:
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, store)
    assert host_devices.has_programs  # of a previous agent
    await host_devices.ensure(links)
    assert host_devices.has_programs is has_programs
    gate_worker.is_attached = False
    await host_devices.ensure(links)
    assert not host_devices.has_programs


async def test_nothing_is_needed_while_podgate_is_off(store: PodStore) -> None:
    gate_worker = _GateWorker()
    gate_worker.is_attached = False
    links = [
        Link(1, "lo", flags=9, is_ethernet=False),
        Link(2, "bridge2", kind="bridge"),
        Link(3, "vxlan3", kind="vxlan", udp_ports=frozenset({8472})),
        Link(4, "eth4"),
        Link(5, "veth5", kind="veth", master=2),
        Link(6, "wg6", kind="wireguard", is_ethernet=False),
    ]
    await make(gate_worker, store).ensure(links, {6}, {6})
    assert gate_worker.tunnels == [(frozenset(), False)]
    assert gate_worker.enforced == [False]
    assert gate_worker.deferred == []
    kinds = (
        *(gate_worker.bridges, gate_worker.devices, gate_worker.uplinks),
        *(gate_worker.bare_devices, gate_worker.hand_made, gate_worker.spoofed),
    )
    assert kinds == ([set()],) * 6


async def test_protected_ports_are_logged_when_they_change(store: PodStore) -> None:
    host_devices = make(_GateWorker(), store)
    tunnel = Link(9, "vxlan9", kind="vxlan", udp_ports=frozenset({8472, 4789}))
    with structlog.testing.capture_logs() as lines:
        for links in ([], [tunnel], [tunnel]):
            await host_devices.ensure(list(links))
    assert [
        (line["udp_ports"], line["any"])
        for line in lines
        if line["event"] is Event.TUNNEL_PORTS_PROTECTED
    ] == [([], False), ([4789, 8472], True)]


async def test_a_switch_is_recorded_when_it_appears_and_vanishes() -> None:
    gate_worker = _GateWorker()
    host_devices = make(gate_worker, PodStore(Conditions()))
    switch = Link(3, "ovs-system", kind="openvswitch")
    for links in ([], [], [switch], [switch], []):
        await host_devices.ensure(list(links))
    assert gate_worker.switches == [False, True, False]


async def test_flag_of_enforced_pods_waits_for_the_sync(store: PodStore) -> None:
    gate_worker = _GateWorker()
    devices = make(gate_worker, store)
    store.relay_gates.clear()
    store.synced.clear()
    await devices.ensure([])
    assert gate_worker.enforced == []
    store.relay_gates[5] = "veth5"
    await devices.ensure([])
    store.synced.set()
    await devices.ensure([])
    store.relay_gates.clear()
    await devices.ensure([])
    assert gate_worker.enforced == [True, False]
