"""The evaluation of `podgate explain` has the verdicts of the gate's own program, on any facts."""

import asyncio
import dataclasses
import ipaddress
import pathlib
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.operate.explain import confirmation, evaluation, model
from agent.operate.explain.facts import HOST, Cgroup, Facts, Flow, GateFacts, NodeFacts, Source
from bpf import artefacts, compiling, features, loader, pins
from bpf.artefacts import Artefact
from bpf.counters import Counters
from bpf.drop_sources import DropSources
from bpf.gate_trial import GateTrial
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict

pytestmark = pytest.mark.kernel

IFINDEX = 7
OWN = {4: ipaddress.ip_address("198.18.1.1"), 6: ipaddress.ip_address("fd00:18:0:1::1")}
OTHER = {4: ipaddress.ip_address("198.18.1.2"), 6: ipaddress.ip_address("fd00:18:0:1::2")}
# A small world, so that sources, rules and the kubelet often meet.
CGROUPS = (11, 12, 13, 14)
PORTS = (0, 53, 80, 8080, 65535)
PROTOCOLS = {4: (6, 17, 132, 1), 6: (6, 17, 132, 58)}
HOUR_NS = 3600 * 10**9


@pytest.fixture(scope="module")
def artefact(isolated: None) -> Artefact:
    offered = features.offered(loader.PROGRAM_SET.features)
    return asyncio.run(compiling.compile_in_process(loader.PROGRAM_SET, offered))


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
    limits = st.sampled_from((0, HOUR_NS))
    ages = st.sampled_from((HOUR_NS // 2, 2 * HOUR_NS))
    return NodeFacts(
        kubelet_cgroup=draw(st.sampled_from((0, *CGROUPS))),
        remade_cgroup=draw(st.sampled_from((0, *CGROUPS))),
        is_unit_followed=draw(st.booleans()),
        pods_cgroup=draw(st.sampled_from((0, *CGROUPS))),
        pods_level=draw(st.integers(1, 3)),
        heartbeat_ns=draw(st.one_of(st.just(0), ages.map(lambda age: max(1, now_ns - age)))),
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
        tuple(draw(st.lists(rules(), max_size=8))),
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
