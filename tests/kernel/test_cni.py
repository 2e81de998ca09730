"""podgate-cni behind real CNI plugins: a pod is closed to the node before it can listen."""

import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pyroute2
import pytest

from agent.cni import state as cni_state
from agent.lab import attempts
from agent.lab.lab import Lab, LabPod
from agent.pods.pod_modes import NewPodModes
from bpf import abi, loader, map_specs, maps, pins, syscalls
from bpf.gates import Attachment, GateConfig
from bpf.node_config import NodeConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups, cniruntime, dialling, offers, traffic
from tests.kernel.cniruntime import FIRST, AddFailed, Network, pod_in, sandbox
from tests.kernel.conftest import MakeGates
from tests.kernel.dialling import PORT
from tests.kernel.reply_tables import start_reply_table
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

KINDS = pytest.mark.parametrize("kind", ["ptp", "bridge"])
ATTACHMENTS = pytest.mark.parametrize("attachment", list(Attachment))
ANY_TCP_PORT = (Rule(SourceKind.KUBELET, 6),)
_MAPS = (
    map_specs.GATE_SLOTS,
    map_specs.MORE_RULES,
    map_specs.GATE_ADDRESSES_MAP,
    map_specs.REPLIES,
    map_specs.ADDRESSES,
)

CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
"""


class Node:
    """A node whose agent is dead: pins, and what it published last."""

    def __init__(
        self, directory: pathlib.Path, plugin: pathlib.Path, installation: pins.Pins
    ) -> None:
        self.directory = directory
        self.plugin = plugin
        self.installation = installation

    def publish(self, mode: Mode, attachment: Attachment = Attachment.CLSACT) -> None:
        cni_state.publish(self.directory, NewPodModes(mode), attachment)

    def network(self, kind: str = "ptp", *, version: str = "1.0.0", **conf: object) -> Network:
        where = {"bpffs": str(self.installation.bpffs), "runDirectory": str(self.directory)}
        whole = where | conf
        return Network(self.directory, kind, self.plugin, version=version, **whole)


@pytest.fixture
def node(
    lab: Lab,
    loaded: loader.Loaded,
    installation: pins.Pins,
    make_gates: MakeGates,
    plugin: pathlib.Path,
    kubelet: cgroups.Cgroup,
    tmp_path: pathlib.Path,
) -> Iterator[Node]:
    """With gates by both ways removed at the end, and the bridge."""
    yield Node(tmp_path, plugin, installation)
    make_gates(Attachment.CLSACT)
    subprocess.run(["ip", "link", "del", cniruntime.BRIDGE], check=False, capture_output=True)


@pytest.fixture
def kubelet(loaded: loader.Loaded) -> Iterator[cgroups.Cgroup]:
    """The kubelet's cgroup, as the agent configured it before it died."""
    config = NodeConfig(loaded)
    with cgroups.cgroup() as made:
        config.set_kubelet(made.id)
        try:
            yield made
        finally:
            config.set_kubelet(None)


def need(attachment: Attachment) -> None:
    if attachment is Attachment.TCX:
        offers.need_tcx()


@contextlib.contextmanager
def added(
    network: Network, name: str, *, bridged: bool = False, words: str = ""
) -> Iterator[LabPod]:
    """A pod that the plugins have connected; words: expected in podgate-cni's stderr."""
    with sandbox(name) as path:
        network.add(name, path)
        assert words in network.stderr
        assert words or not network.stderr, network.stderr
        try:
            yield pod_in(path, name, bridged=bridged)
        finally:
            network.delete(name, path)


def kubelet_reaches(kubelet: cgroups.Cgroup, address: str) -> bool:
    done = kubelet.run([*BARE_PYTHON, "-c", CONNECT, address, str(PORT)])
    return done.returncode == 0


@KINDS
@ATTACHMENTS
def test_client_that_dials_from_the_start_never_reaches_an_enforced_pod(
    node: Node, kubelet: cgroups.Cgroup, kind: str, attachment: Attachment
) -> None:
    need(attachment)
    node.publish(Mode.ENFORCE, attachment)
    with dialling.dialling(*FIRST.values()) as dialler:
        dialler.go_on(4)
        with added(node.network(kind), "web", bridged=kind == "bridge") as pod:
            assert [pod.ipv4, pod.ipv6] == list(FIRST.values())
            listening = pod.listen(PORT)  # as the first container does, when ADD has returned
            with listening:
                dialler.go_on()
                for address in FIRST.values():
                    assert kubelet_reaches(kubelet, address)
                dialler.go_on()
        assert dialler.connected == 0


@KINDS
def test_without_a_gate_the_same_client_reaches_the_pod(node: Node, kind: str) -> None:
    with dialling.dialling(*FIRST.values()) as dialler:
        words = "pod starts without a gate"
        bridged = kind == "bridge"
        with (
            added(node.network(kind), "web", bridged=bridged, words=words) as pod,
            pod.listen(PORT),
        ):
            assert traffic.node_reaches(pod, 4, PORT)
            dialler.go_on()
    assert dialler.connected


@ATTACHMENTS
def test_the_next_agent_finds_the_gate_as_its_own(
    node: Node, make_gates: MakeGates, attachment: Attachment
) -> None:
    need(attachment)
    node.publish(Mode.ENFORCE, attachment)
    with added(node.network(), "web") as pod:
        gates = make_gates(attachment)
        found = gates.installed()
        assert found.keys() == {pod.ifindex}
        config = found[pod.ifindex]
        assert config is not None
        assert (config.mode, config.rules) == (Mode.ENFORCE, ANY_TCP_PORT)
        assert set(config.addresses) == set(pod.addresses)
        assert any(address.is_link_local for address in config.addresses)
        assert gates.is_first(pod.ifindex)
        assert gates.counts().keys() >= {pod.ifindex}
        with dialling.dialling(pod.ipv4, pod.ipv6) as dialler, pod.listen(PORT):
            exact = GateConfig(Mode.ENFORCE, pod.addresses, (Rule(SourceKind.KUBELET, 6, 80, 80),))
            dialler.go_on()
            gates.install(pod.ifindex, exact, grace_seconds=5)
            start_reply_table(gates, pod.ifindex)
            dialler.go_on()
        assert dialler.connected == 0
        assert gates.installed() == {pod.ifindex: exact}
        assert not gates.counts()[pod.ifindex].get((Verdict.PASS, Reason.GRACE))
        gates.remove(pod.ifindex)
        assert not gates.installed()


@ATTACHMENTS
def test_an_agent_that_runs_already_takes_it_over_without_grace(
    node: Node, make_gates: MakeGates, attachment: Attachment
) -> None:
    need(attachment)
    node.publish(Mode.ENFORCE, attachment)
    gates = make_gates(attachment)
    with added(node.network(), "web") as pod:
        gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses), grace_seconds=5)
        start_reply_table(gates, pod.ifindex)
        assert attempts.datagram_from_node(pod, "IPv4") == "does not arrive"
        assert gates.is_attached(pod.ifindex)


@ATTACHMENTS
def test_what_the_agent_has_done_already_stays(
    node: Node, make_gates: MakeGates, attachment: Attachment
) -> None:
    need(attachment)
    node.publish(Mode.ENFORCE, attachment)
    gates = make_gates(attachment)
    network = node.network(strictStart=True)
    with added(network, "web") as pod:
        exact = GateConfig(Mode.AUDIT, pod.addresses)
        gates.install(pod.ifindex, exact)
        start_reply_table(gates, pod.ifindex)
        network.gate("web", pod.netns.path)
        assert gates.installed() == {pod.ifindex: exact}


@ATTACHMENTS
def test_agent_and_plugin_at_the_same_time_make_one_gate(
    node: Node, make_gates: MakeGates, loaded: loader.Loaded, attachment: Attachment
) -> None:
    need(attachment)
    node.publish(Mode.OFF, attachment)
    gates = make_gates(attachment)
    network = node.network(strictStart=True)
    with concurrent.futures.ThreadPoolExecutor(1) as runtime:
        for number in range(12):
            with sandbox("web") as path:
                node.publish(Mode.OFF, attachment)
                network.add("web", path)
                node.publish(Mode.ENFORCE, attachment)
                pod = pod_in(path, "web")
                adding = runtime.submit(network.gate, "web", path)
                # At any point of the plugin's work: the outcome is the same.
                time.sleep(number * 0.004)
                gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
                start_reply_table(gates, pod.ifindex)
                adding.result()
                assert pod.ifindex in gates.installed()
                with pod.listen(PORT):
                    assert traffic.node_is_dropped(pod, 4, PORT)
                network.delete("web", path)
                assert left(node, loaded) == nothing()


def test_replies_from_the_host_pass(node: Node) -> None:
    node.publish(Mode.ENFORCE, Attachment.CLSACT)
    with added(node.network(), "web") as pod:
        for family in attempts.FAMILIES:
            gateway = traffic.NODE[4 if family == "IPv4" else 6]
            assert attempts.query_from_pod(pod, gateway, family) == "arrives"
            assert attempts.datagram_from_node(pod, family) == "does not arrive"


@KINDS
def test_pods_reach_each_other(node: Node, kind: str) -> None:
    node.publish(Mode.ENFORCE, Attachment.CLSACT)
    network = node.network(kind)
    with added(network, "web") as web, added(network, "other") as other, web.listen(PORT):
        for family in attempts.FAMILIES:
            address = attempts.address_of(web, family)
            assert attempts.connect_from_pod(other, address, family, PORT) == "connects"


def test_audit_passes_and_counts_from_the_first_packet(node: Node, make_gates: MakeGates) -> None:
    node.publish(Mode.AUDIT)
    with added(node.network(), "web") as pod, pod.listen(PORT):
        assert traffic.node_reaches(pod, 4, PORT)
        counts = make_gates(Attachment.CLSACT).counts()[pod.ifindex]
        assert counts[Verdict.WOULD_DROP, Reason.NODE]


def test_off_touches_nothing(node: Node, make_gates: MakeGates) -> None:
    node.publish(Mode.OFF)
    network = node.network(strictStart=True)
    with added(network, "web") as pod, pod.listen(PORT):
        assert traffic.node_reaches(pod, 4, PORT)
        assert not make_gates(Attachment.CLSACT).installed()


def test_with_strict_start_no_pod_starts_before_there_are_pins(
    node: Node, fresh_pins: pins.Pins
) -> None:
    node.publish(Mode.ENFORCE)
    network = node.network(strictStart=True, bpffs=str(fresh_pins.bpffs))
    with sandbox("web") as path:
        with pytest.raises(AddFailed) as failure:
            network.add("web", path)
        error = failure.value.answer.error
        assert error["code"] == 11
        assert error["msg"] == "the pod cannot be gated yet; try again"
        assert "maps/gates cannot be opened (No such file or directory)" in error["details"]
        network.delete("web", path)
    with added(node.network(strictStart=True), "web") as pod, pod.listen(PORT):
        assert traffic.node_is_dropped(pod, 4, PORT)


def test_map_of_another_layout_is_an_error(
    node: Node, fresh_pins: pins.Pins, loaded: loader.Loaded
) -> None:
    node.publish(Mode.ENFORCE)
    fresh_pins.prepare()
    maps_of_others = loaded.map(map_specs.COUNTERS)
    syscalls.pin(maps_of_others.fd, fresh_pins.map(map_specs.GATES))
    network = node.network(strictStart=True, bpffs=str(fresh_pins.bpffs))
    with sandbox("web") as path:
        with pytest.raises(AddFailed) as failure:
            network.add("web", path)
        assert "is not the map that this version uses" in failure.value.answer.error["details"]
        network.delete("web", path)


def test_an_agent_that_is_stopped_with_the_maps_locked_holds_no_pod_up(node: Node) -> None:
    node.publish(Mode.ENFORCE)
    lock = os.open(node.installation.maps, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with added(node.network(), "web", words="maps locked for more than 5 s; it may be stopped"):
            pass
    finally:
        os.close(lock)


def test_no_filter_where_another_qdisc_would_run_it_in_the_other_direction(
    node: Node, loaded: loader.Loaded
) -> None:
    """The CNI plugin bandwidth adds a qdisc ingress, on which egress filters run at the ingress."""
    node.publish(Mode.OFF)
    network = node.network(strictStart=True)
    with sandbox("web") as path:
        network.add("web", path)
        pod = pod_in(path, "web")
        with pyroute2.IPRoute() as netlink:
            netlink.tc("add", "ingress", pod.ifindex)
        node.publish(Mode.ENFORCE)
        with pytest.raises(AddFailed) as failure:
            network.gate("web", path)
        problem = f"interface {pod.ifindex} has a qdisc ingress where clsact is needed"
        assert problem in failure.value.answer.error["details"]
        network.delete("web", path)
        assert left(node, loaded) == nothing()


def test_counters_begin_at_zero_whatever_another_gate_has_counted(
    node: Node, make_gates: MakeGates, loaded: loader.Loaded
) -> None:
    for counters in (loaded.map(map_specs.COUNTERS), loaded.map(map_specs.FREQUENT_COUNTS)):
        for slot in range(abi.FIRST_SLOT, abi.SLOT_COUNT):
            counters.set(struct.pack("=I", slot), b"\x01" * counters.value_size)
    node.publish(Mode.ENFORCE)
    with added(node.network(), "web") as pod:
        counts = make_gates().counts()[pod.ifindex]
    # A process's neighbour discovery and the like may have been counted since.
    assert all(count < 1000 for count in counts.values())


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0"])
def test_every_version_of_the_protocol_gates(node: Node, version: str) -> None:
    node.publish(Mode.ENFORCE)
    network = node.network(version=version)
    with added(network, "web") as pod, pod.listen(PORT):
        assert traffic.node_is_dropped(pod, 4, PORT)
        assert network.check("web", pod.netns.path).status == 0


@ATTACHMENTS
def test_check_finds_a_gate_that_is_half_there(
    node: Node, make_gates: MakeGates, loaded: loader.Loaded, attachment: Attachment
) -> None:
    need(attachment)
    node.publish(Mode.ENFORCE, attachment)
    network = node.network()
    with added(network, "web") as pod:
        path = pod.netns.path
        assert network.check("web", path).status == 0
        key = pod.ifindex.to_bytes(4, sys.byteorder)
        table = loaded.map(map_specs.GATE_SLOTS)
        value = table.get(key)
        assert value
        table.delete(key)
        error = network.check("web", path).error
        assert (error["code"], "has no configuration" in error["details"]) == (100, True)
        make_gates(attachment).remove(pod.ifindex)
        assert network.check("web", path).status == 0
        table.set(key, value)
        error = network.check("web", path).error
        assert (error["code"], "is not attached" in error["details"]) == (100, True)


@pytest.mark.parametrize("knows", ["all", "no result", "no netns", "nothing"])
@ATTACHMENTS
def test_del_leaves_nothing_with_any_arguments_of_the_runtime(
    node: Node, loaded: loader.Loaded, attachment: Attachment, knows: str
) -> None:
    need(attachment)
    node.publish(Mode.ENFORCE, attachment)
    network = node.network()
    with sandbox("web") as path:
        network.add("web", path)
        if knows in ("all", "no result"):
            network.delete("web", path, knows_result=knows == "all")
            assert left(node, loaded) == nothing()
        network.delete("web", path)
    # The namespace and its interfaces are deleted.
    network.delete("web", "" if knows == "nothing" else path, knows_result=knows != "nothing")
    assert network.collect().status == 0
    assert left(node, loaded) == nothing()


def test_a_hundred_pods_leave_nothing(node: Node, loaded: loader.Loaded) -> None:
    attachment = Attachment.best()
    node.publish(Mode.ENFORCE, attachment)
    network = node.network()

    def live(number: int) -> None:
        with sandbox(f"web{number}") as path:
            network.add(f"web{number}", path)
            network.delete(f"web{number}", path)

    with concurrent.futures.ThreadPoolExecutor(4) as runtime:
        list(runtime.map(live, range(100)))
    assert left(node, loaded) == nothing()
    assert not os.listdir("/run/netns")
    assert not [name for _, name in socket.if_nameindex() if name.startswith("veth")]


def left(node: Node, loaded: loader.Loaded) -> dict[str, list[object]]:
    """Pinned links, and keys of the maps of interfaces."""
    found: dict[str, list[object]] = {"links": list(node.installation.links.iterdir())}
    for spec in _MAPS:
        found[spec.name] = list(keys(loaded.map(spec)))
    return found


def nothing() -> dict[str, list[object]]:
    return {"links": [], **{spec.name: [] for spec in _MAPS}}


def keys(table: maps.Map) -> list[bytes]:
    return [key for key, _ in table.items_by_key()]


def test_an_address_of_two_pods_belongs_to_neither(
    node: Node, loaded: loader.Loaded, lab: Lab
) -> None:
    """In networks of their own pods may have the same; then only the gates distinguish them."""
    node.publish(Mode.ENFORCE)
    table = loaded.map(map_specs.ADDRESSES)
    with added(node.network(), "web") as pod:
        key = abi.pack_address(pod.addresses[0])
        assert owner(table, key) == pod.ifindex
        again = Network(
            node.directory / "again",
            "ptp",
            node.plugin,
            bpffs=str(node.installation.bpffs),
            runDirectory=str(node.directory),
        )
        with added(again, "twin") as twin:
            assert twin.addresses[0] == pod.addresses[0]
            assert owner(table, key) == 0
        assert owner(table, key) == pod.ifindex
    assert owner(table, key) is None


def owner(table: maps.Map, key: bytes) -> int | None:
    value = table.get(key)
    return None if value is None else int.from_bytes(value, sys.byteorder)
