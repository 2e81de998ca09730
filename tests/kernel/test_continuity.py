"""Gates and connections while agents are killed and upgraded, and pods are created and deleted.

A host process tries every pod each millisecond, by connect(2) and by a raw socket. A pod talks with
another and with the host. Meanwhile the agent is killed at any moment, also while it loads, and
replaced by an older or newer version with another schema and other layouts. Pods are created and
deleted with and without an agent. No packet of the attacker arrives, and no connection breaks.

`make test-continuity` is the long form; every run of the tests has a short one.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, condition_of, execute
from agent.lab.lab import Lab, LabPod
from agent.labels import ISOLATION_READY
from agent.logs import Event
from agent.pods.conditions import TRUE
from bpf import abi, artefacts
from bpf.gates import Attachment
from tests import polling
from tests.kernel import loads, offers, traffic, versions
from tests.nodes.worker import Worker

pytestmark = pytest.mark.kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How much happens in one run."""

    kills: int
    upgrades: int
    pods: int


SHORT = Scale(kills=3, upgrades=2, pods=20)
LONG = Scale(kills=20, upgrades=5, pods=200)
SCALE = LONG if os.environ.get("PODGATE_TEST_CONTINUITY") else SHORT

# An agent starts within a second or so; it is killed before, while and after it loads.
_LONGEST_LIFE_SECONDS = 1.5
# Pods that live at the same time, besides the two that talk.
_CROWD = 15


class Node:
    """The agents and pods of one node."""

    def __init__(
        self, lab: Lab, operator: AgentProcess, attacker: loads.Load, attachment: Attachment
    ) -> None:
        self.pods: list[LabPod] = []
        self._lab = lab
        self._operator = operator
        self._attacker = attacker
        self._attachment = attachment
        self._names = itertools.count()
        self._listeners: dict[str, contextlib.ExitStack] = {}

    def start(self, version: pathlib.Path | None) -> None:
        """version: directory of its `bpf` package; None for this tree's."""
        with pytest.MonkeyPatch.context() as patch:
            if version is not None:
                patch.setenv(artefacts.DIRECTORY_VARIABLE, str(versions.compiled(version)))
            self._operator.start_in(
                version, "--mode", "enforce", "--attach", self._attachment.value
            )

    def add_pod(self) -> LabPod:
        """Add a pod that listens. The attacker gets its address before the agent does."""
        number = next(self._names)
        pod = self._lab.add_pod(f"p{number}", number % 250 + 1)
        self._listeners[pod.name] = contextlib.ExitStack()
        self._listeners[pod.name].enter_context(pod.listen(loads.PORT))
        self.pods.append(pod)
        self._attacker.set_targets([pod.ipv4 for pod in self.pods])
        self._operator.write_manifest(pod, mode=None, container={})
        return pod

    def remove_pod(self) -> None:
        """Remove the oldest pod without connections, its namespace first, as a kubelet does."""
        pod = self.pods.pop(2)
        self._attacker.set_targets([pod.ipv4 for pod in self.pods])
        self._listeners.pop(pod.name).close()
        self._lab.remove_pod(pod.name)
        (self._operator.manifests / f"{pod.name}.yaml").unlink()

    def settle(self, schema: int) -> None:
        """Wait until all pods have gates of this schema, and no other schema is left."""
        self._operator.wait_for("all pods guarded", self._are_all_guarded)
        root = self._operator.bpffs / "podgate"
        self._operator.wait_for(
            "the other schemas gone", lambda _: list(root.glob("v*")) == [root / f"v{schema}"]
        )

    def _are_all_guarded(self, report: AgentReport) -> bool:
        return report.is_synced and all(
            (condition := condition_of(report, pod.name, ISOLATION_READY)) is not None
            and (condition.status, condition.reason) == (TRUE, "Enforced")
            for pod in self.pods
        )

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()


@pytest.fixture
def other_versions(worker: Worker) -> list[tuple[int, pathlib.Path | None]]:
    """Schemas in the order of the upgrades, repeated: newer, older, two at once."""
    found: list[tuple[int, pathlib.Path | None]] = []
    for schema, gate_addresses in ((abi.SCHEMA + 1, 4), (abi.SCHEMA + 2, 1)):

        def make(directory: pathlib.Path, schema: int = schema, held: int = gate_addresses) -> None:
            directory.mkdir()
            versions.of_schema(directory, schema, gate_addresses=held)
            versions.compile_programs(directory)

        found.append((schema, worker.made_once(f"schema-{schema}", make)))
    later, latest = found
    ours = (abi.SCHEMA, None)
    return [later, ours, latest, later, ours]


@pytest.fixture
def attachment(request: pytest.FixtureRequest) -> Attachment:
    found: Attachment = request.param
    if found is Attachment.TCX:
        offers.need_tcx()
    return found


@pytest.fixture
def node(
    lab: Lab, operator: AgentProcess, attachment: Attachment
) -> Iterator[tuple[Node, loads.Load]]:
    offers.need_default_deny()  # pods are attacked before they have a gate
    # Its kills are at all times of an agent's start.
    operator.launch = execute
    with loads.attacker() as attacker:
        made = Node(lab, operator, attacker, attachment)
        yield made, attacker
        made.close()


@pytest.mark.parametrize("attachment", list(Attachment), indirect=True)
def test_gates_stay_closed_and_connections_open_while_the_agent_is_killed_and_upgraded(
    node: tuple[Node, loads.Load],
    operator: AgentProcess,
    other_versions: list[tuple[int, pathlib.Path | None]],
) -> None:
    chance = random.Random(SCALE.kills)
    cluster, attacker = node
    schema, version = abi.SCHEMA, None
    upgrades = dict(zip(_spread(SCALE.upgrades, SCALE.kills), other_versions, strict=False))
    per_life = SCALE.pods // SCALE.kills

    cluster.start(version)
    operator.wait_for("the agent", lambda report: report.is_synced)
    one, other = cluster.add_pod(), cluster.add_pod()
    cluster.settle(schema)
    with loads.talker(one, other) as talker:
        for kill in range(SCALE.kills):
            if kill in upgrades:
                schema, version = upgrades[kill]
            created_without_agent = chance.randint(0, per_life)
            for _ in range(per_life - created_without_agent):
                _come_and_go(cluster)
            operator.stop(signal.SIGKILL)
            for _ in range(created_without_agent):
                _come_and_go(cluster)
            cluster.start(version)
            if kill in upgrades:
                time.sleep(chance.uniform(0, _LONGEST_LIFE_SECONDS))
                operator.stop(signal.SIGKILL)
                cluster.start(version)
                cluster.settle(schema)
            else:
                time.sleep(chance.uniform(0, _LONGEST_LIFE_SECONDS))
        operator.stop(signal.SIGKILL)
        cluster.start(version)
        cluster.settle(schema)
        talked = talker.result()
    attacked = attacker.result()
    assert attacked["reached"] == []
    assert attacked["attempts"] > 100 * SCALE.kills
    assert talked["broken"] == ""
    assert talked["rounds"] > 10 * SCALE.kills

    # Without a gate both ways are detected.
    operator.stop(signal.SIGTERM)
    assert operator.cleanup().returncode == 0
    with loads.attacker() as again:
        again.set_targets([one.ipv4])
        polling.wait_until("some attempts", lambda: again.attempts() >= 10)
        reached = again.result()["reached"]
    assert {how for *_, how in reached} == {"connect", "raw"}


def test_pod_that_cannot_be_read_keeps_the_gate_of_the_previous_version(
    lab: Lab, operator: AgentProcess, other_versions: list[tuple[int, pathlib.Path | None]]
) -> None:
    """Its gate may not be removed, and cannot be taken over: its configuration is unknown."""
    schema, version = other_versions[0]
    before, after = (operator.bpffs / "podgate" / f"v{number}" for number in (abi.SCHEMA, schema))
    pod = lab.add_pod("web", 1)
    with pod.listen(80):
        operator.write_manifest(pod, mode="enforce", container={})
        operator.start()
        operator.wait_for("the gate", lambda _: Event.INTERFACE_GATED.key in events(operator))
        operator.stop(signal.SIGKILL)
        operator.write_file("web.yaml", "a: [")
        operator.start_in(version)
        operator.wait_for("the sync", lambda report: report.is_synced)
        assert before.is_dir()
        assert after.is_dir()
        assert Event.STALE_GATE_REMOVED.key not in events(operator)
        assert frames_are_dropped(pod)

        operator.write_manifest(pod, mode="enforce", container={})
        operator.wait_for("the old schema gone", lambda _: not before.exists())
        assert frames_are_dropped(pod)


def events(operator: AgentProcess) -> set[str]:
    return {line["event"] for line in operator.log_lines()}


def frames_are_dropped(pod: LabPod) -> bool:
    """Tries with a packet socket, which no hook at connect(2) rejects."""
    return attempts.inject_syn(pod, traffic.NODE[4], "IPv4", 80, 4242) == "does not arrive"


def _come_and_go(cluster: Node) -> None:
    cluster.add_pod()
    if len(cluster.pods) > _CROWD + 2:
        cluster.remove_pod()


def _spread(count: int, among: int) -> list[int]:
    """`count` numbers below `among`, evenly."""
    return [among * number // count for number in range(count)]
