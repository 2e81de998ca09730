"""What opens without an agent, and when: the sentences for an operator."""

import dataclasses
import datetime

import pytest

from agent.operate.pinned.exposures import ALL, DECLARED_PORTS, Facts, exposures, in_words
from bpf.gate_config import GateConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
KUBELET = Rule(SourceKind.KUBELET, protocol=6, first_port=8080, last_port=8080)
OTHER = Rule(SourceKind.CGROUP, cgroup=7)
DEAD = Facts(
    heartbeat_age=40,
    stale_after=15,
    dead_man=24 * 3600,
    is_identified=True,
    is_followed=True,
    knows_pods=True,
    is_relay_up=False,
)


def gate(mode: Mode = Mode.ENFORCE, *rules: Rule, without_fallback: bool = False) -> GateConfig:
    return GateConfig(mode, (), rules or (KUBELET,), without_fallback=without_fallback)


def texts(facts: Facts, *gates: GateConfig) -> list[str]:
    return [exposure.text for exposure in exposures(facts, gates, NOW)]


def test_only_the_dead_man_opens_where_the_kernel_follows_the_kubelet() -> None:
    assert texts(DEAD, gate(), gate()) == [
        "All gates open in 23 h 59 min unless an agent starts (--dead-man-hours)."
    ]


def test_stale_heartbeat_opens_declared_ports_where_nothing_follows_the_kubelet() -> None:
    facts = dataclasses.replace(DEAD, is_followed=False)
    found = exposures(facts, [gate(), gate(), gate(Mode.ENFORCE, OTHER)], NOW)
    assert found[0].text == (
        "Declared ports of 2 pods are open to host processes outside pods: no heartbeat for 40 s, "
        "and the kernel does not follow the kubelet's restarts."
    )
    assert (found[0].what, found[0].is_open, found[0].pods) == (DECLARED_PORTS, True, 2)
    assert found[0].at == NOW - datetime.timedelta(seconds=25)
    assert (found[1].what, found[1].is_open, found[1].pods) == (ALL, False, 3)


def test_fresh_heartbeat_is_counted_down() -> None:
    facts = dataclasses.replace(DEAD, is_followed=False, heartbeat_age=3)
    found = exposures(facts, [gate()], NOW)
    assert found[0].text == (
        "Declared ports of 1 pod open to host processes outside pods in 12 s unless an agent "
        "starts: the kernel does not follow the kubelet's restarts."
    )
    assert not found[0].is_open


def test_unknown_kubelet_is_open_now() -> None:
    facts = dataclasses.replace(DEAD, is_identified=False, knows_pods=False)
    assert texts(facts, gate())[0] == (
        "Declared ports of 1 pod are open to all host and pod processes: the kubelet is not "
        "identified."
    )


def test_after_the_dead_man_time_all_gates_are_open() -> None:
    facts = dataclasses.replace(DEAD, heartbeat_age=25 * 3600)
    assert texts(facts, gate()) == [
        "All gates are open: no heartbeat for 25 h 0 min, and --dead-man-hours is 24."
    ]
    assert exposures(facts, [gate()], NOW)[0].is_open


@pytest.mark.parametrize(
    ("change", "gates"),
    [
        pytest.param({"dead_man": 0}, [gate()], id="dead man never"),
        pytest.param({"heartbeat_age": None}, [gate()], id="no agent has run yet"),
        pytest.param({}, [], id="no gates"),
        pytest.param({"is_followed": False}, [gate(Mode.AUDIT)], id="audit is open anyway"),
        pytest.param(
            {"is_followed": False, "dead_man": 0, "stale_after": 0}, [gate()], id="never stale"
        ),
    ],
)
def test_nothing_opens(change: dict[str, float], gates: list[GateConfig]) -> None:
    assert texts(dataclasses.replace(DEAD, **change), *gates) == []  # type: ignore[arg-type]


def test_strict_opens_with_the_relay_gone_unless_it_has_no_fallback() -> None:
    facts = dataclasses.replace(DEAD, is_followed=False, dead_man=0)
    assert len(texts(facts, gate(Mode.STRICT))) == 1
    assert texts(facts, gate(Mode.STRICT, KUBELET, without_fallback=True)) == []
    assert texts(dataclasses.replace(facts, is_relay_up=True), gate(Mode.STRICT)) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"),
        (40.4, "40 s"),
        (60, "1 min 0 s"),
        (245, "4 min 5 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (83520, "23 h 12 min"),
    ],
)
def test_time_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
