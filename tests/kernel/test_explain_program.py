"""The evaluation of `podgate explain` has the verdicts of the gate's own program, on any facts."""

import dataclasses
import ipaddress
import itertools
import pathlib
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.operate.explain import confirmation, evaluation, model
from agent.operate.explain.facts import HOST, Facts, Flow, GateFacts, Source
from bpf import abi, artefacts, features, loader, pins
from bpf.artefacts import Artefact
from bpf.counters import Counters
from bpf.drop_sources import DropSources
from bpf.gate_config import GateConfig
from bpf.gate_trial import GateTrial
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel.explained import own_source

pytestmark = pytest.mark.kernel

IFINDEX = 7
OWN = {4: ipaddress.ip_address("198.18.1.1"), 6: ipaddress.ip_address("fd00:18:0:1::1")}
OTHER = {4: ipaddress.ip_address("198.18.1.2"), 6: ipaddress.ip_address("fd00:18:0:1::2")}
# A small world, so that sources, rules and the kubelet often meet.
CGROUPS = (11, 12, 13, 14)
PORTS = (0, 53, 80, 8080, 65535)
PROTOCOLS = {4: (6, 17, 132, 1), 6: (6, 17, 132, 58)}
LIMIT_NS = time.monotonic_ns() // 4
"""A share of the time since the machine started: no heartbeat is older than that."""
OPENED = Flow(OWN[4], 6, 80)


@pytest.fixture(scope="module")
def artefact(isolated: None) -> Artefact:
    """What the run has compiled for all of its tests."""
    return artefacts.find(loader.PROGRAM_SET, features.offered(loader.PROGRAM_SET.features))


@pytest.fixture(scope="module")
def trial(artefact: Artefact) -> Iterator[GateTrial]:
    with GateTrial(artefact) as made:
        yield made


cgroups = st.sampled_from(CGROUPS)


@st.composite
def sources(draw: st.DrawFn) -> Source:
    depth = draw(st.integers(1, 3))
    path = tuple(draw(st.permutations(CGROUPS))[:depth])
    return Source(HOST, "a test", Cgroup(path[-1], "/test", (1, *path)))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    first, last = (draw(st.sampled_from(PORTS)) for _ in range(2))
    return Rule(
        draw(st.sampled_from(SourceKind)),
        draw(st.sampled_from((0, 6, 17, 132, 1, 58))),
        first,
        last,
        cgroup=draw(cgroups),
        level=draw(st.integers(0, 4)),
    )


@st.composite
def nodes(draw: st.DrawFn, now_ns: int) -> NodeFacts:
    """Ages far from the limits, since the program has a clock of its own."""
    limits = st.sampled_from((0, LIMIT_NS))
    ages = st.sampled_from((LIMIT_NS // 2, 2 * LIMIT_NS))
    is_unit_followed = draw(st.booleans())
    return NodeFacts(
        kubelet_cgroup=draw(st.sampled_from((0, *CGROUPS))),
        remade_cgroup=draw(st.sampled_from((0, *CGROUPS))) if is_unit_followed else 0,
        is_unit_followed=is_unit_followed,
        pods_cgroup=draw(st.sampled_from((0, *CGROUPS))),
        pods_level=draw(st.integers(1, 3)),
        heartbeat_ns=draw(st.one_of(st.just(0), ages.map(lambda age: now_ns - age))),
        stale_after_ns=draw(limits),
        dead_man_ns=draw(limits),
        has_ovs=draw(st.booleans()),
    )


@st.composite
def gates(draw: st.DrawFn) -> GateFacts:
    return GateFacts(
        IFINDEX,
        "test0",
        draw(st.sampled_from((Mode.AUDIT, Mode.ENFORCE, Mode.STRICT))),
        frozenset(OWN.values()),
        tuple(draw(st.lists(rules(), max_size=abi.GATE_RULES))),
        has_any_address=draw(st.booleans()),
        has_fallback=draw(st.booleans()),
    )


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    version = draw(st.sampled_from((4, 6)))
    protocol = draw(st.sampled_from(PROTOCOLS[version]))
    port = 0 if protocol in (1, 58) else draw(st.sampled_from(PORTS))
    return Flow(draw(st.sampled_from((OWN[version], OTHER[version]))), protocol, port)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_verdict_and_reason_are_those_of_the_gates_program(
    trial: GateTrial, data: st.DataObject
) -> None:
    now_ns = time.monotonic_ns()
    gate, flow, source = data.draw(gates()), data.draw(flows()), data.draw(sources())
    facts = Facts(node=data.draw(nodes(now_ns)), gates={IFINDEX: gate}, owners={}, route=IFINDEX)
    found = evaluation.evaluate(facts, source, flow, now_ns)
    assert confirmation.can_confirm(source, found)
    answer = confirmation.trial_verdict(trial, facts, source, flow, found)
    assert answer == (found.verdict, found.reason)


class Program:
    """The gate's program, for flows of this process: nothing is put in the source's place."""

    def __init__(self, trial: GateTrial) -> None:
        self._trial = trial
        self._source = own_source()
        assert self._source.cgroup is not None
        self.own = self._source.cgroup
        assert self.own.id == trial.cgroup

    def assert_same(
        self,
        rule: Rule,
        *,
        config: abi.CConfig | None = None,
        remade: abi.CKubeletRemade | None = None,
        flow: Flow = OPENED,
    ) -> Reason:
        """The reason of both, of a gate with this rule."""
        config, remade = config or abi.CConfig(), remade or abi.CKubeletRemade()
        gate = GateConfig(Mode.ENFORCE, tuple(OWN.values()), (rule,))
        of_gate = GateFacts(IFINDEX, "test0", gate.mode, frozenset(OWN.values()), gate.rules)
        node = NodeFacts.of(config, remade)
        facts = Facts(node, {IFINDEX: of_gate}, {}, route=IFINDEX)
        found = evaluation.evaluate(facts, self._source, flow, time.monotonic_ns())
        answer = self._trial.run(config, gate, confirmation.first_frame(flow), remade)
        assert answer == (found.verdict, found.reason), (rule, node)
        return answer[1]


def test_kubelet_is_the_same_as_for_the_program(trial: GateTrial) -> None:
    program, now_ns = Program(trial), time.monotonic_ns()
    own, seen = program.own, set()
    others = own.ancestors[-2], own.id
    for kubelet, unit, remade, of_unit, (pods, level), (age_ns, limit_ns) in itertools.product(
        (0, *others),
        (0, 1),
        others,
        (1, 2),
        ((0, 0), (own.ancestors[1], 1), (own.ancestors[1], 2), (own.id, len(own.ancestors))),
        ((0, LIMIT_NS), (LIMIT_NS // 2, LIMIT_NS), (2 * LIMIT_NS, LIMIT_NS), (2 * LIMIT_NS, 0)),
    ):
        config = abi.CConfig(
            kubelet_cgroup=kubelet,
            kubelet_unit=unit,
            pods_cgroup=pods,
            pods_cgroup_level=level,
            heartbeat_ns=now_ns - age_ns if age_ns else 0,
            stale_after_ns=limit_ns,
        )
        made = abi.CKubeletRemade(remade, of_unit)
        seen.add(program.assert_same(Rule(SourceKind.KUBELET), config=config, remade=made))
    assert seen == {Reason.PROBE, Reason.UNIDENTIFIED, Reason.STALE, Reason.NODE}


def test_dead_man_is_the_same_as_for_the_program(trial: GateTrial) -> None:
    program, now_ns, seen = Program(trial), time.monotonic_ns(), []
    for age_ns, limit_ns in itertools.product((0, LIMIT_NS // 2, 2 * LIMIT_NS), (0, LIMIT_NS)):
        heartbeat_ns = now_ns - age_ns if age_ns else 0
        config = abi.CConfig(heartbeat_ns=heartbeat_ns, dead_man_ns=limit_ns)
        seen.append(program.assert_same(Rule(SourceKind.KERNEL), config=config))
    assert seen.count(Reason.DEAD_MAN) == 1


def test_source_of_a_rule_is_the_same_as_for_the_program(trial: GateTrial) -> None:
    program = Program(trial)
    above = program.own.ancestors
    for kind, cgroup, level in itertools.product(
        SourceKind, (*above, max(above) + 1), range(len(above) + 2)
    ):
        program.assert_same(Rule(kind, cgroup=cgroup, level=level))


def test_destination_of_a_rule_is_the_same_as_for_the_program(trial: GateTrial) -> None:
    program = Program(trial)
    for protocol, first, last, opened in itertools.product(
        (0, 6, 17), (0, 79, 80, 81), (79, 80, 81, 65535), (6, 17, 132, 1)
    ):
        flow = Flow(OWN[4], opened, 0 if opened == 1 else 80)
        program.assert_same(Rule(SourceKind.ANY, protocol, first, last), flow=flow)


def enforced() -> tuple[Facts, Source, Flow]:
    gate = GateFacts(IFINDEX, "test0", Mode.ENFORCE, frozenset(OWN.values()))
    node = NodeFacts(kubelet_cgroup=CGROUPS[0])
    source = Source(HOST, "a test", Cgroup(CGROUPS[1], "/test", (1, CGROUPS[1])))
    return Facts(node, {IFINDEX: gate}, {}, route=IFINDEX), source, Flow(OWN[4], 6, 80)


def test_program_of_the_image_confirms_the_answer_and_counts_nothing_of_the_node(
    loaded: loader.Loaded,
    installation: pins.Pins,
    artefact: Artefact,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = features.offered(loader.PROGRAM_SET.features)
    path = artefacts.path(tmp_path, loader.PROGRAM_SET, offered)
    path.write_bytes(artefact.encode())
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    facts, source, flow = enforced()
    found = evaluation.evaluate(facts, source, flow, time.monotonic_ns())
    before = Counters(loaded).of_host(), DropSources(loaded).read()
    answer = confirmation.confirm(installation, facts, source, flow, found)
    assert answer == (found, model.SAME)
    assert found.verdict is Verdict.DROP
    assert (Counters(loaded).of_host(), DropSources(loaded).read()) == before


def test_verdict_of_the_program_counts_where_the_evaluation_differs(
    loaded: loader.Loaded,
    installation: pins.Pins,
    artefact: Artefact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confirmation, "GateTrial", lambda: GateTrial(artefact))
    facts, source, flow = enforced()
    found = evaluation.evaluate(facts, source, flow, time.monotonic_ns())
    wrong = dataclasses.replace(found, verdict=Verdict.PASS, reason=Reason.RULE)
    answer, confirmed = confirmation.confirm(installation, facts, source, flow, wrong)
    assert (answer.verdict, answer.reason) == (Verdict.DROP, Reason.NODE)
    assert "please report this" in confirmed


def test_image_without_programs_confirms_nothing(
    loaded: loader.Loaded,
    installation: pins.Pins,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    facts, source, flow = enforced()
    found = evaluation.evaluate(facts, source, flow, time.monotonic_ns())
    answer, confirmed = confirmation.confirm(installation, facts, source, flow, found)
    assert answer == found
    assert confirmed.startswith("not run: there are no compiled programs")
