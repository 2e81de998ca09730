"""What opens without an agent, and when: the sentences for an operator."""

import dataclasses
import datetime

import pytest

from agent.operate.pinned.exposures import ALL, DECLARED_PORTS, exposures, in_words
from agent.operate.pinned.report import Exposure
from bpf.gate_config import GateConfig
from bpf.rule_evaluation import NodeFacts
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
KUBELET = Rule(SourceKind.KUBELET, protocol=6, first_port=8080, last_port=8080)
OTHER = Rule(SourceKind.CGROUP, cgroup=7)
SECOND_NS, HOUR_NS = 10**9, 3600 * 10**9
NOW_NS = 1000 * HOUR_NS
DEAD = NodeFacts(
    kubelet_cgroup=7,
    is_unit_followed=True,
    pods_cgroup=8,
    pods_level=1,
    heartbeat_ns=NOW_NS - 40 * SECOND_NS,
    stale_after_ns=15 * SECOND_NS,
    dead_man_ns=24 * HOUR_NS,
)


def gate(mode: Mode = Mode.ENFORCE, *rules: Rule, without_fallback: bool = False) -> GateConfig:
    return GateConfig(mode, (), rules or (KUBELET,), without_fallback=without_fallback)


def opened(node: NodeFacts, *gates: GateConfig, is_relay_up: bool = False) -> list[Exposure]:
    return exposures(node, gates, is_relay_up=is_relay_up, now_ns=NOW_NS, now=NOW)


def texts(node: NodeFacts, *gates: GateConfig, is_relay_up: bool = False) -> list[str]:
    return [exposure.text for exposure in opened(node, *gates, is_relay_up=is_relay_up)]


def test_only_the_dead_man_opens_where_the_kernel_follows_the_kubelet() -> None:
    assert texts(DEAD, gate(), gate()) == [
        "All gates open in 23 h 59 min unless an agent starts (--dead-man-hours)."
    ]


def test_stale_heartbeat_opens_declared_ports_where_nothing_follows_the_kubelet() -> None:
    node = dataclasses.replace(DEAD, is_unit_followed=False)
    found = opened(node, gate(), gate(), gate(Mode.ENFORCE, OTHER))
    assert found[0].text == (
        "Declared ports of 2 pods are open to host processes outside pods: no heartbeat for 40 s, "
        "and the kernel does not follow the kubelet's restarts."
    )
    assert (found[0].what, found[0].is_open, found[0].pods) == (DECLARED_PORTS, True, 2)
    assert found[0].at == NOW - datetime.timedelta(seconds=25)
    assert (found[1].what, found[1].is_open, found[1].pods) == (ALL, False, 3)
    assert found[1].at == NOW + datetime.timedelta(hours=24, seconds=-40)


def test_fresh_heartbeat_is_counted_down() -> None:
    node = dataclasses.replace(DEAD, is_unit_followed=False, heartbeat_ns=NOW_NS - 3 * SECOND_NS)
    found = opened(node, gate())
    assert found[0].text == (
        "Declared ports of 1 pod open to host processes outside pods in 12 s unless an agent "
        "starts: the kernel does not follow the kubelet's restarts."
    )
    assert not found[0].is_open
    assert found[0].at == NOW + datetime.timedelta(seconds=12)


def test_what_opens_first_is_the_first() -> None:
    node = dataclasses.replace(DEAD, is_unit_followed=False, stale_after_ns=48 * HOUR_NS)
    assert [exposure.what for exposure in opened(node, gate())] == [ALL, DECLARED_PORTS]
    unknown = dataclasses.replace(DEAD, kubelet_cgroup=0)
    found = opened(unknown, gate(), gate())
    assert [(exposure.what, exposure.is_open, exposure.at is None) for exposure in found] == [
        (DECLARED_PORTS, True, True),
        (ALL, False, False),
    ]


def test_unknown_kubelet_is_open_now() -> None:
    node = dataclasses.replace(DEAD, kubelet_cgroup=0, pods_cgroup=0)
    assert texts(node, gate())[0] == (
        "Declared ports of 1 pod are open to all host and pod processes: the kubelet is not "
        "identified."
    )


def test_after_the_dead_man_time_all_gates_are_open() -> None:
    node = dataclasses.replace(DEAD, heartbeat_ns=NOW_NS - 25 * HOUR_NS)
    assert texts(node, gate()) == [
        "All gates are open: no heartbeat for 25 h 0 min, and --dead-man-hours is 24."
    ]
    (found,) = opened(node, gate(), gate(Mode.AUDIT))
    assert (found.is_open, found.pods) == (True, 1)
    assert found.at == NOW - datetime.timedelta(hours=1)
    half = dataclasses.replace(node, dead_man_ns=HOUR_NS // 2)
    assert "and --dead-man-hours is 0.5." in texts(half, gate())[0]


@pytest.mark.parametrize(
    ("change", "gates"),
    [
        pytest.param({"dead_man_ns": 0}, [gate()], id="dead man never"),
        pytest.param({"heartbeat_ns": 0}, [gate()], id="no agent has run yet"),
        pytest.param({}, [], id="no gates"),
        pytest.param({"is_unit_followed": False}, [gate(Mode.AUDIT)], id="audit is open anyway"),
        pytest.param(
            {"is_unit_followed": False, "dead_man_ns": 0, "stale_after_ns": 0},
            [gate()],
            id="never stale",
        ),
    ],
)
def test_nothing_opens(change: dict[str, int], gates: list[GateConfig]) -> None:
    assert texts(dataclasses.replace(DEAD, **change), *gates) == []  # type: ignore[arg-type]


def test_strict_opens_with_the_relay_gone_unless_it_has_no_fallback() -> None:
    node = dataclasses.replace(DEAD, is_unit_followed=False, dead_man_ns=0)
    assert len(texts(node, gate(Mode.STRICT))) == 1
    assert texts(node, gate(Mode.STRICT, KUBELET, without_fallback=True)) == []
    assert texts(node, gate(Mode.STRICT), is_relay_up=True) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"),
        (40.4, "40 s"),
        (59, "59 s"),
        (60, "1 min 0 s"),
        (245, "4 min 5 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7199, "1 h 59 min"),
        (83520, "23 h 12 min"),
        (250 * 3600 + 59, "250 h 0 min"),
    ],
)
def test_time_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
