"""What decides before a gate: the verdict of `podgate explain` is that of the kernel."""

import socket
import time
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.operate.explain import evaluation, model, reading
from agent.operate.explain.evaluation import Evaluation
from agent.operate.explain.facts import Flow, Source
from agent.operate.pinned import installation as pinned_installation
from bpf import loader, pins
from bpf.gates import GateConfig, Gates
from bpf.node_config import NodeConfig
from bpf.redirect import Redirect
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests import polling
from tests.kernel import cgroups, default_deny, explained, frames, redirecting, traffic
from tests.kernel.default_deny import OpenTable, open_table, tracked
from tests.kernel.redirecting import OTHER_PORT, PORT, Scene
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

__all__ = ["open_table", "tracked"]

VERSIONS = pytest.mark.parametrize("version", [4, 6])
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
PROBED = Rule(SourceKind.KUBELET, TCP)


def explain(
    installation: pins.Pins, source: Source, address: str, protocol: int, port: int
) -> Evaluation:
    target = frames.address(address)
    with pinned_installation.opened(installation) as loaded:
        found = reading.read(installation, loaded, target)
    return evaluation.evaluate(found, source, Flow(target, protocol, port), time.monotonic_ns())


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    """The kubelet is the test itself."""
    with redirecting.kubelet_config(loaded) as made:
        yield made


@pytest.fixture
def redirect(
    config: NodeConfig, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[Redirect]:
    with redirecting.engaged(loaded, installation) as made:
        yield made


@pytest.fixture
def scene(lab: labs.Lab, gates: Gates) -> Iterator[Scene]:
    """A pod in strict, whose gate admits the kubelet to any port."""
    with redirecting.scene(lab) as made:
        gates.install(made.pod.ifindex, GateConfig(Mode.STRICT, made.pod.addresses, (PROBED,)))
        yield made


@VERSIONS
def test_connect_of_the_kubelet_that_the_relay_proxies_is_the_relays(
    scene: Scene,
    redirect: Redirect,
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
) -> None:
    """Of one port; to the other one the kubelet connects itself."""
    scene.publish(redirect, ports=(PORT,))
    address = traffic.address(scene.pod, version)
    for port, whose, decider in (
        (PORT, "relay", model.RELAY),
        (OTHER_PORT, "pod", model.GATE),
    ):
        found = explain(installation, explained.own_source(), address, TCP, port)
        assert (found.verdict, found.decided_by) == (Verdict.PASS, decider)
        assert scene.reached_from_node(version, port) == whose
    redirecting.beat(loaded, time.monotonic_ns() - 10**9)
    found = explain(installation, explained.own_source(), address, TCP, PORT)
    assert (found.decided_by, found.reason) == (model.GATE, Reason.PROBE)
    assert scene.reached_from_node(version) == "pod"


@VERSIONS
def test_connect_of_the_kubelet_without_a_relay_is_the_gates(
    scene: Scene, redirect: Redirect, gates: Gates, installation: pins.Pins, version: int
) -> None:
    scene.publish(redirect)
    redirect.disengage()
    address = traffic.address(scene.pod, version)
    found = explain(installation, explained.own_source(), address, TCP, PORT)
    assert (found.decided_by, found.reason) == (model.GATE, Reason.PROBE)
    assert scene.reached_from_node(version) == "pod"
    gates.install(
        scene.pod.ifindex,
        GateConfig(Mode.STRICT, scene.pod.addresses, (PROBED,), without_fallback=True),
    )
    found = explain(installation, explained.own_source(), address, TCP, PORT)
    assert (found.verdict, found.reason) == (Verdict.DROP, Reason.STRICT)
    assert traffic.node_is_dropped(scene.pod, version, PORT)


@VERSIONS
def test_relay_is_for_the_kubelet_only(
    scene: Scene, redirect: Redirect, installation: pins.Pins, version: int
) -> None:
    scene.publish(redirect)
    with cgroups.cgroup() as group:
        address = traffic.address(scene.pod, version)
        found = explain(installation, explained.source_in(group.path), address, TCP, PORT)
        assert (found.verdict, found.reason) == (Verdict.DROP, Reason.NODE)
        script = (
            "import socket, sys\n"
            "sock = socket.socket(socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET)\n"
            "sock.settimeout(float(sys.argv[3]))\n"
            "sys.exit(sock.connect_ex((sys.argv[1], int(sys.argv[2]))) != 0)\n"
        )
        seconds = str(traffic.DROPPED_AFTER_SECONDS)
        done = group.run([*BARE_PYTHON, "-c", script, address, str(PORT), seconds])
        assert done.returncode == 1


def agrees(
    installation: pins.Pins,
    pod: labs.LabPod,
    group: cgroups.Cgroup,
    version: int,
    *,
    is_reached: bool,
) -> None:
    """TCP of a process in the cgroup: whether it is dropped, and by the table."""
    address = traffic.address(pod, version)
    found = explain(installation, explained.source_in(group.path), address, TCP, 80)
    expected = model.NO_GATE if is_reached else model.DEFAULT_DENY
    assert (found.verdict is Verdict.PASS, found.decided_by) == (is_reached, expected)
    seconds = traffic.LIMIT_SECONDS if is_reached else traffic.DROPPED_AFTER_SECONDS
    assert default_deny.connect_from(group, pod, version, seconds) is is_reached


@default_deny.PATHS
@VERSIONS
def test_new_interface_is_closed_by_the_default_deny_table(
    lab: labs.Lab,
    open_table: OpenTable,
    config: NodeConfig,
    installation: pins.Pins,
    version: int,
    bridged: bool,
) -> None:
    opened = open_table()
    pod = lab.add_pod("web", 1, bridged=bridged)
    with (
        cgroups.cgroup() as kubelet,
        cgroups.cgroup("below", below=kubelet) as below,
        cgroups.cgroup() as stranger,
        pod.listen(80),
    ):
        opened.admit(kubelet.path)
        config.set_kubelet(kubelet.id)
        for group in (kubelet, below):
            agrees(installation, pod, group, version, is_reached=True)
        agrees(installation, pod, stranger, version, is_reached=False)
        opened.admit(None)
        agrees(installation, pod, stranger, version, is_reached=True)
        opened.admit(kubelet.path)
        opened.gate([pod.ifindex])
        agrees(installation, pod, stranger, version, is_reached=True)


@VERSIONS
def test_table_without_a_heartbeat_is_open(
    lab: labs.Lab,
    open_table: OpenTable,
    config: NodeConfig,
    installation: pins.Pins,
    version: int,
) -> None:
    opened = open_table(stale_seconds=1)
    pod = lab.add_pod("web", 1)
    with cgroups.cgroup() as kubelet, cgroups.cgroup() as stranger, pod.listen(80):
        opened.admit(kubelet.path)
        config.set_kubelet(kubelet.id)
        polling.wait_until("its end", lambda: not _is_alive())
        agrees(installation, pod, stranger, version, is_reached=True)


def _is_alive() -> bool:
    found = reading.default_deny()
    assert found is not None
    return found.is_alive


@VERSIONS
def test_datagram_passes_the_table_where_no_connections_are_tracked(
    lab: labs.Lab,
    open_table: OpenTable,
    installation: pins.Pins,
    config: NodeConfig,
    version: int,
) -> None:
    config.set_kubelet(None)
    assert not open_table().covers_datagrams
    pod = lab.add_pod("web", 1)
    address = traffic.address(pod, version)
    assert explain(installation, explained.own_source(), address, UDP, 5300).verdict is Verdict.PASS
    assert arrives(pod, version, traffic.LIMIT_SECONDS)


@VERSIONS
def test_datagram_is_dropped_by_the_table_where_connections_are_tracked(
    lab: labs.Lab,
    tracked: None,
    open_table: OpenTable,
    installation: pins.Pins,
    config: NodeConfig,
    version: int,
) -> None:
    config.set_kubelet(None)
    assert open_table().covers_datagrams
    pod = lab.add_pod("web", 1)
    address = traffic.address(pod, version)
    found = explain(installation, explained.own_source(), address, UDP, 5300)
    assert (found.verdict, found.decided_by) == (Verdict.DROP, model.DEFAULT_DENY)
    assert not arrives(pod, version, traffic.DROPPED_AFTER_SECONDS)


def arrives(pod: labs.LabPod, version: int, seconds: float) -> bool:
    """Whether a datagram of the host does within this time."""
    family = traffic.family(version)
    with (
        pod.open_socket(family, socket.SOCK_DGRAM) as server,
        socket.socket(family, socket.SOCK_DGRAM) as client,
    ):
        server.bind(("", 5300))
        server.settimeout(seconds)
        try:
            client.sendto(b"datagram", (traffic.address(pod, version), 5300))
            return server.recv(100) == b"datagram"
        except (PermissionError, TimeoutError):  # nftables' drop of the host's own packet, or none
            return False
