"""Which annotation of a running pod is in force, and which changes are reported (KEP-6318)."""

import asyncio
import json
from typing import Any

import pytest
import structlog.testing

from agent.logs import Event
from agent.pods.events import PodEvents
from agent.pods.pod import Pod
from agent.probing.result_store import ResultStore, SavedProbes
from agent.probing.spec_changes import REASON, SpecChanges, changes
from probes.spec.specs import PodSpec, with_annotation
from tests.agent.probing.answering import HEALTHZ, OWN_CHECK, http, spec

OTHER_CHECK: dict[str, Any] = OWN_CHECK | {"tcp": {"port": 9001}}
FIRST = spec({"livenessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
OTHER = spec({"livenessProbe": HEALTHZ}, {"liveness": OTHER_CHECK})
INVALID = with_annotation(FIRST, "{not JSON")
WITHOUT = with_annotation(FIRST, None)
PLAIN = with_annotation(spec({"livenessProbe": http("/other")}, {}), None)


class _Results(ResultStore):
    saves = 0

    def save_soon(self) -> None:
        self.saves += 1


class Following:
    """One pod whose spec changes, and what is reported about it."""

    def __init__(self) -> None:
        self.events = PodEvents()
        self.restart()
        self.sandbox = SavedProbes(uid="a", sandbox="1", started_at=0.0)

    def restart(self) -> None:
        results = _Results(None)
        self.results = results
        self.changes = SpecChanges(results, self.events)

    def take(self, given: PodSpec) -> PodSpec:
        pod = Pod(namespace="shop", name="web", uid="a", spec=given)
        return self.changes.take(pod, self.sandbox).spec

    async def reported(self) -> list[tuple[str, bool]]:
        try:
            found = await asyncio.wait_for(self.events.next(), 0.01)
        except TimeoutError:
            return []
        assert {event.reason for event in found} == {REASON}
        return [(event.message, event.is_warning) for event in found]


@pytest.mark.looptime
async def test_changed_annotation_is_in_force_at_once_and_is_an_event() -> None:
    pod = Following()
    assert pod.take(FIRST) == FIRST
    assert pod.take(FIRST) == FIRST
    assert await pod.reported() == []
    assert pod.take(OTHER) == OTHER
    assert await pod.reported() == [('Container "app": liveness probe updated.', False)]
    assert pod.take(WITHOUT) == WITHOUT
    assert await pod.reported() == [('Container "app": liveness probe updated.', False)]


@pytest.mark.looptime
async def test_invalid_change_keeps_the_last_valid_annotation_over_restarts() -> None:
    pod = Following()
    pod.take(FIRST)
    assert pod.take(OTHER) == OTHER
    await pod.reported()
    for _ in range(2):
        assert pod.take(INVALID).containers == OTHER.containers
        assert "is invalid" in pod.changes.text("a")
        assert await pod.reported() == []
        pod.restart()
    assert pod.take(FIRST) == FIRST
    assert pod.changes.text("a") == ""


def test_annotation_is_saved_when_it_changes() -> None:
    pod = Following()
    saves = []
    for given in (INVALID, WITHOUT, WITHOUT, FIRST, FIRST, INVALID, OTHER):
        pod.take(given)
        saves.append(pod.results.saves)
    assert saves == [0, 1, 1, 2, 2, 2, 3]
    assert pod.changes.text("a") == ""
    assert (pod.sandbox.is_taken, pod.sandbox.annotation) == (True, OTHER.annotation)


def test_rejected_change_and_changed_probe_are_logged_once() -> None:
    pod = Following()
    with structlog.testing.capture_logs() as lines:
        for given in (FIRST, INVALID, INVALID, with_annotation(FIRST, "{}"), OTHER, OTHER):
            pod.take(given)
    assert [line["event"] for line in lines] == [
        *[Event.PROBE_SPEC_REJECTED] * 2,
        Event.PROBE_CHANGED,
    ]
    changed = {name: lines[2][name] for name in ("pod", "uid", "container", "probe", "action")}
    assert changed == {
        **{"pod": "shop/web", "uid": "a", "container": "app"},
        **{"probe": "liveness", "action": "updated"},
    }


def test_removed_pod_is_forgotten() -> None:
    pod = Following()
    pod.take(FIRST)
    pod.take(INVALID)
    assert pod.changes.text("a")
    assert pod.changes.text("b") == ""
    pod.changes.forget("a")
    assert pod.changes.text("a") == ""
    with structlog.testing.capture_logs() as lines:
        pod.take(OTHER)
    assert lines == []


def test_annotation_that_was_never_valid_stays_rejected_until_it_is_corrected() -> None:
    pod = Following()
    assert pod.take(INVALID).errors
    assert pod.changes.text("a") == ""
    assert pod.take(FIRST) == FIRST


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        (spec({}, {}), spec({}, {"readiness": {"tcp": {"port": 1}}}), "readiness probe added"),
        (spec({}, {"readiness": {"tcp": {"port": 1}}}), spec({}, {}), "readiness probe removed"),
        (WITHOUT, FIRST, "liveness probe updated"),
    ],
)
def test_probes_of_the_annotation_are_reported(
    before: PodSpec, after: PodSpec, action: str
) -> None:
    assert [str(one) for one in changes(before, after)] == [f'Container "app": {action}.']


def test_probe_of_each_container_is_reported() -> None:
    same, other = {"livenessProbe": HEALTHZ}, {"livenessProbe": http("/b")}
    checks = {"name": "app2", "liveness": OWN_CHECK}
    text = {"apiVersion": "podgate.io/v2", "containers": [checks]}
    before = with_annotation(spec(same, {}, others=(other,)), None)
    after = with_annotation(before, json.dumps(text))
    assert [str(one) for one in changes(before, after)] == [
        'Container "app2": liveness probe updated.'
    ]


def test_probe_that_the_kubelet_runs_as_well_is_reported_by_the_kubelet() -> None:
    assert list(changes(WITHOUT, PLAIN)) == []
    # The annotation's check is the same as before.
    moved = spec({"livenessProbe": http("/other")}, {"liveness": OWN_CHECK})
    assert list(changes(FIRST, moved)) == []
