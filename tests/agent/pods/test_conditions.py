"""Conditions: what changes, when, and what is logged."""

import datetime

import msgspec
import pytest
import structlog.testing

from agent import labels
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE, Condition, Conditions, level_of
from agent.pods.pod import Pod, Problem
from probes.spec.specs import parse_pod

POD = Pod(uid="u", namespace="shop", name="web")
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime.datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += datetime.timedelta(seconds=seconds)


def test_transition_time_moves_only_with_the_status() -> None:
    clock = Clock()
    conditions = Conditions(now=clock)
    conditions.set(POD, labels.ISOLATION_READY, FALSE, "GateFailed", "one")
    clock.advance(5)
    conditions.set(POD, labels.ISOLATION_READY, FALSE, "NoInterface", "two")
    condition = conditions.get("u", labels.ISOLATION_READY)
    assert condition is not None
    assert (condition.reason, condition.last_transition_time) == ("NoInterface", START)
    clock.advance(5)
    conditions.set(POD, labels.ISOLATION_READY, TRUE, "Enforced", "")
    condition = conditions.get("u", labels.ISOLATION_READY)
    assert condition is not None
    assert condition.last_transition_time == START + datetime.timedelta(seconds=10)


def test_unchanged_condition_is_neither_published_nor_logged() -> None:
    conditions = Conditions(now=Clock())
    assert conditions.set(POD, labels.PROBES_PASSING, TRUE, "ProbesPassing", "")
    with structlog.testing.capture_logs() as lines:
        assert not conditions.set(POD, labels.PROBES_PASSING, TRUE, "ProbesPassing", "")
    assert lines == []


def test_each_change_of_a_condition_marks_its_pod() -> None:
    conditions = Conditions(now=Clock())
    changes = conditions.changes.subscribe()
    conditions.set(POD, labels.PROBES_PASSING, TRUE, "ProbesPassing", "")
    assert changes.take() == ["u"]
    conditions.set(POD, labels.PROBES_PASSING, TRUE, "ProbesPassing", "")
    assert changes.take() == []
    conditions.set(POD, labels.PROBES_PASSING, TRUE, "ProbesPassing", "of two containers")
    assert changes.take() == ["u"]
    for uid in ("u", "other"):
        conditions.remove(uid, labels.PROBES_PASSING)
    assert changes.take() == ["u"]
    assert conditions.of("u") == []


def test_conditions_of_others_follow_podgates_own_by_type() -> None:
    conditions = Conditions(now=Clock())
    later = START + datetime.timedelta(hours=1)
    for kind in ("example.com/b", labels.PROBES_PASSING, "example.com/a", labels.ISOLATION_READY):
        conditions.set(POD, kind, TRUE, "Fine", "", since=later)
    assert [(one.type, one.last_transition_time) for one in conditions.of("u")] == [
        (labels.ISOLATION_READY, later),
        (labels.PROBES_PASSING, later),
        ("example.com/a", later),
        ("example.com/b", later),
    ]


def test_each_change_is_one_complete_line() -> None:
    conditions = Conditions(now=Clock())
    with structlog.testing.capture_logs() as lines:
        conditions.set(POD, labels.ISOLATION_READY, FALSE, "NetnsInvalid", "why")
    assert lines == [
        {
            "event": Event.CONDITION_CHANGED,
            "log_level": "warning",
            "pod": "shop/web",
            "uid": "u",
            "type": labels.ISOLATION_READY,
            "status": FALSE,
            "reason": "NetnsInvalid",
            "detail": "why",
            "was": None,
        }
    ]


def test_manifest_problem_is_a_warning_though_the_gate_is_attached() -> None:
    conditions = Conditions(now=Clock())
    pod = Pod(uid="u", namespace="shop", name="web", manifest_problem=Problem("x", "y"))
    with structlog.testing.capture_logs() as lines:
        conditions.set(pod, labels.ISOLATION_READY, TRUE, "Enforced", "")
    assert [line["log_level"] for line in lines] == ["warning"]


def test_a_forgotten_pod_has_no_conditions() -> None:
    conditions = Conditions(now=Clock())
    conditions.set(POD, labels.ISOLATION_READY, TRUE, "Audit", "")
    conditions.forget("u")
    assert conditions.of("u") == []


def condition(status: str, reason: str, kind: str = labels.ISOLATION_READY) -> Condition:
    return Condition(kind, status, reason, "", datetime.datetime.now(datetime.UTC))


@pytest.mark.parametrize(
    ("before", "now", "level"),
    [
        (None, condition(FALSE, "SandboxMissing"), "info"),
        (None, condition(FALSE, "NoInterface"), "info"),
        (None, condition(FALSE, "ProbePending", labels.PROBES_PASSING), "info"),
        (condition(FALSE, "NoInterface"), condition(TRUE, "Enforced"), "info"),
        (condition(TRUE, "Enforced"), condition(TRUE, "Strict"), "info"),
        (condition(FALSE, "SandboxMissing"), condition(FALSE, "NoInterface"), "info"),
        (condition(TRUE, "Enforced"), condition(FALSE, "NetnsNotFound"), "info"),
        (condition(TRUE, "Enforced"), condition(FALSE, "NoInterface"), "warning"),
        (condition(TRUE, "ProbesPassing"), condition(FALSE, "ContainerNotRunning"), "warning"),
        (condition(FALSE, "ProbePending"), condition(FALSE, "ProbeFailing"), "warning"),
        (None, condition(FALSE, "GateBypassed"), "warning"),
        (None, condition(FALSE, "GateFailed"), "warning"),
        (None, condition(FALSE, "NetnsInUse"), "warning"),
    ],
)
def test_a_problem_is_a_warning_and_waiting_is_not(
    before: Condition | None, now: Condition, level: str
) -> None:
    assert level_of(before, now, POD) == level
    assert level_of(before, now, msgspec.structs.replace(POD, is_deleting=True)) == "info"


@pytest.mark.parametrize(
    ("kind", "level"), [(labels.PROBES_PASSING, "warning"), (labels.ISOLATION_READY, "info")]
)
def test_invalid_probe_concerns_the_condition_of_probes_alone(kind: str, level: str) -> None:
    spec = parse_pod({"spec": {"containers": [{"name": "app", "readinessProbe": {}}]}})
    assert spec.errors
    now = Condition(kind, TRUE, "Enforced", "", START)
    assert level_of(None, now, msgspec.structs.replace(POD, spec=spec)) == level
