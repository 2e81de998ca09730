"""No agent runs for ten minutes, and the kubelet's cgroup is removed and made again five times.

From each of its cgroups the kubelet probes pods in enforce and in strict, over IPv4 and IPv6, as
long as it runs. Other host processes try declared and other ports of all pods, by connect(2) and by
raw sockets, also while the kubelet's cgroup does not exist and while it is empty. Each probe
succeeds, and nothing of the others arrives.

`make test-continuity` is the long form; every run of the tests has a short one, in which the last
heartbeat is made ten minutes old.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from agent.lab.agent_process import Launch
from bpf import loader, pins
from bpf.drop_sources import DropSources
from tests import polling
from tests.conftest import fresh_lab
from tests.kernel import cgroups, fleet, loads, offers, pacing
from tests.kernel.strictnode import Node, strict_node
from tests.kernel.test_standin import beat_long_ago

pytestmark = pytest.mark.kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How long no agent runs. seconds: at least; 0: no longer than the restarts take."""

    seconds: float


SHORT = Scale(seconds=0)
LONG = Scale(seconds=600)
SCALE = LONG if os.environ.get("PODGATE_TEST_CONTINUITY") else SHORT

RESTARTS = 5
PROBES = (fleet.http_probe(fleet.HTTP), fleet.tcp_probe(fleet.TCP))
DECLARED = (fleet.HTTP, fleet.TCP)
PORTS = (*DECLARED, fleet.ELSEWHERE)
# Emulated machines take about the square of the patience factor for a probe.
PER_SECOND = round(80 / polling.PATIENCE**2)
# From each cgroup: each of 16 targets several times.
PROBES_BETWEEN = 64
# Of each process while the kubelet is missing, while its cgroup is empty, and while it probes:
# each of 24 targets several times.
ATTEMPTS_BETWEEN = 100


@pytest.fixture
def system() -> Iterator[cgroups.Cgroup]:
    """The cgroup above the units."""
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def node(
    launch: Launch,
    installed: pins.Pins,
    tmp_path_factory: pytest.TempPathFactory,
    system: cgroups.Cgroup,
) -> Iterator[Node]:
    offers.need_netns_cookie()
    with (
        cgroups.cgroup("kubelet.service", below=system) as unit,
        fresh_lab() as lab,
        strict_node(lab, tmp_path_factory.mktemp("node"), launch, installed) as made,
    ):
        made.kubelet = unit
        pods = [(mode, way) for mode in ("enforce", "strict") for way in ("routed", "bridged")]
        for number, (mode, way) in enumerate(pods, 1):
            made.add(
                *(f"{mode}-{way}", number),
                ports=PORTS,
                probes=PROBES,
                mode=mode,
                bridged=way == "bridged",
            )
        made.start()
        yield made


@pytest.fixture
def addresses(node: Node) -> list[str]:
    return [address for pod in node.pods.values() for address in (pod.pod.ipv4, pod.pod.ipv6)]


def test_each_probe_succeeds_and_no_other_process_reaches_a_pod(
    node: Node, system: cgroups.Cgroup, addresses: list[str], tmp_path: pathlib.Path
) -> None:
    probes: list[pacing.Paced] = []
    kubelets: list[int] = []
    moments: list[tuple[str, float]] = []
    """To find out when a probe was lost, by the same clock as its own times."""

    def note(what: str) -> None:
        moments.append((what, time.monotonic()))

    with (
        cgroups.cgroup("kubelet.service2", below=system) as beside,
        loads.attacker(system) as one,
        loads.attacker(beside) as other,
    ):
        attackers = (one, other)
        for attacker in attackers:
            attacker.set_targets(addresses, PORTS)
        for life in range(RESTARTS + 1):
            if life:
                note("its cgroup is removed")
                cgroups.remove(node.kubelet)
                wait_for_attempts(attackers)
                note("its cgroup is made")
                node.kubelet.directory.mkdir()
                wait_for_attempts(attackers)
            kubelets.append(node.kubelet.id)
            note("it probes")
            with probing(node, tmp_path / str(life)) as prober:
                if not life:
                    go_on(prober, attackers)
                    abandoned_at = abandon(node)
                    note("the agent is killed")
                go_on(prober, attackers)
                lives_until = abandoned_at + SCALE.seconds * (life + 1) / (RESTARTS + 1)
                time.sleep(max(0, lives_until - time.monotonic()))
                if life == RESTARTS:
                    dropped = dropped_cgroups(node.operator.bpffs)
                    note("the agent starts")
                    node.start()
                    note("the agent is ready")
                    go_on(prober, attackers)
                probes += prober.result()
        found = [attacker.result() for attacker in attackers]
        lost = [probe for probe in probes if probe.result != pacing.OK]
        assert lost == [], (moments, node.operator.log_lines() if lost else [])
        assert [attacked["reached"] for attacked in found] == [[], []]
        assert len(set(kubelets)) == RESTARTS + 1
        assert dropped & {*kubelets, system.id, beside.id} == {system.id, beside.id}
    assert_attackers_reach_open_pods(node, addresses)


def abandon(node: Node) -> float:
    """Kill the agent. Returns when, by `time.monotonic`."""
    node.operator.stop(signal.SIGKILL)
    now = time.monotonic()
    if not SCALE.seconds:
        beat_long_ago(node.operator.bpffs)
    return now


@contextlib.contextmanager
def probing(node: Node, folder: pathlib.Path) -> Iterator[pacing.Pacing]:
    """The kubelet's probes from its current cgroup. folder: to be created."""
    folder.mkdir()
    kinds = (("http", fleet.HTTP), ("tcp", fleet.TCP))
    targets = [
        target
        for kind, port in kinds
        for pod in node.pods.values()
        for target in pod.targets(kind, port)
    ]
    with pacing.paced(node.kubelet, folder, PER_SECOND, targets) as prober:
        yield prober


def go_on(prober: pacing.Pacing, attackers: Sequence[loads.Load]) -> None:
    prober.wait_for_more(PROBES_BETWEEN)
    wait_for_attempts(attackers)


def wait_for_attempts(attackers: Sequence[loads.Load]) -> None:
    """For some more of each."""
    wanted = [(attacker, attacker.attempts() + ATTEMPTS_BETWEEN) for attacker in attackers]
    polling.wait_until(
        "more attempts", lambda: all(attacker.attempts() >= enough for attacker, enough in wanted)
    )


def dropped_cgroups(bpffs: os.PathLike[str]) -> set[int]:
    """Ids of all cgroups of which the gates and hooks have dropped anything."""
    loaded = asyncio.run(loader.load(pins.Pins(bpffs)))
    try:
        return {source.cgroup for source in DropSources(loaded).read()}
    finally:
        loaded.close()


def assert_attackers_reach_open_pods(node: Node, addresses: list[str]) -> None:
    """Without gates each way and each family is noticed."""
    node.operator.stop(signal.SIGTERM)
    assert node.operator.cleanup().returncode == 0
    with loads.attacker() as attacker:
        attacker.set_targets(addresses, PORTS)
        wait_for_attempts([attacker])
        reached = attacker.result()["reached"]
    assert {(":" in address, how) for address, _, how in reached} == {
        (is_ipv6, how) for is_ipv6 in (False, True) for how in ("connect", "raw")
    }
