"""Events of findings: once for each that lasts, at once for what is open, and again later."""

import asyncio

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding, found
from agent.admin.finding_kinds import Severity
from agent.app import node_findings
from agent.app.node_findings import GUARDS, NodeFindings
from agent.pods.conditions import Conditions
from agent.pods.events import PodEvent, PodEvents
from agent.pods.pod import Pod
from agent.pods.store import PodStore

pytestmark = pytest.mark.looptime

OPEN = found(kinds.OFF, "It is off")
HOOK = found(kinds.HOOK_MISSING, "It is gone")
LABEL = found(kinds.LABEL_IGNORED, "It is no mode", "namespace shop")
GONE = found(kinds.GATE_FAILED, "It failed", "pod shop/gone")


class Recorded:
    """Findings of a node, and the Events that were recorded by now."""

    def __init__(self, *current: Finding) -> None:
        self.current = list(current)
        self._events = PodEvents()
        self.store = PodStore(Conditions())
        self._node = NodeFindings(lambda: self.current, self._events, self.store)

    async def after(self, seconds: float) -> list[PodEvent]:
        """What is recorded within that time, by rounds of five seconds."""
        recorded = []
        for _ in range(int(seconds // 5)):
            self._node.record()
            try:
                async with asyncio.timeout(0.1):
                    recorded += await self._events.next()
            except TimeoutError:
                pass
            await asyncio.sleep(5)
        return recorded


async def test_what_is_open_is_an_event_at_once_and_again_while_it_lasts() -> None:
    node = Recorded(OPEN)
    assert await node.after(5) == [PodEvent(None, "Off", "It is off.", action="Checking")]
    assert await node.after(280) == []
    assert [event.message for event in await node.after(60)] == ["It is off."]


async def test_what_lasts_for_a_moment_is_none() -> None:
    node = Recorded(HOOK)
    assert await node.after(5) == []
    node.current = []
    assert await node.after(5) == []
    node.current = [HOOK]
    assert [event.reason for event in await node.after(15)] == ["HookMissing"]


async def test_label_of_a_namespace_is_an_event_about_it() -> None:
    (event,) = await Recorded(LABEL).after(15)
    assert event == PodEvent(
        None, "LabelIgnored", "It is no mode.", action="Checking", namespace="shop"
    )


async def test_finding_of_a_pod_is_an_event_of_that_pod() -> None:
    node = Recorded(found(kinds.GATE_FAILED, "It failed", "pod shop/web"))
    for name in ("api", "web", "db"):
        node.store.set_pod(Pod(uid=f"uid-{name}", namespace="shop", name=name))
    (event,) = await node.after(15)
    assert event == PodEvent("uid-web", "GateFailed", "It failed.", action="Checking")


async def test_notes_and_what_others_report_are_no_events() -> None:
    quiet = (kinds.PROBE_FAILING, kinds.PODS_NOT_SYNCED, kinds.WATCH_BROKEN)
    notes = [kind for kind in kinds.KINDS.values() if kind.severity is Severity.NOTE]
    assert notes
    node = Recorded(*(found(kind, "It is so") for kind in (*quiet, *notes)), OPEN)
    assert [event.reason for event in await node.after(60)] == ["Off"]


async def test_findings_are_counted_by_severity_and_kind() -> None:
    store, current = PodStore(Conditions()), [LABEL, HOOK, OPEN, found(kinds.HOOK_MISSING, "Too")]
    node = NodeFindings(lambda: current, PodEvents(), store)
    counts, _ = node.collect()
    assert counts.samples == []
    await node.refresh()
    counts, _ = node.collect()
    assert [(*one.labels.values(), one.value) for one in counts.samples] == sorted(
        [
            (LABEL.severity, LABEL.kind, 1.0),
            (HOOK.severity, HOOK.kind, 2.0),
            (OPEN.severity, OPEN.kind, 1.0),
        ]
    )


async def test_pod_that_is_gone_has_none() -> None:
    assert await Recorded(GONE).after(5) == []


async def test_expensive_findings_of_unchanged_pods_are_found_less_often_and_at_once_after_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_findings, "_REST_PER_FIND", 1e12)
    found_at: list[float] = []
    now = asyncio.get_running_loop().time

    def find() -> list[Finding]:
        found_at.append(now())
        return []

    store = PodStore(Conditions())
    node = NodeFindings(find, PodEvents(), store)
    task = asyncio.create_task(node.run())
    await asyncio.sleep(29)
    assert len(found_at) == 1
    store.in_force.mark("web")
    await asyncio.sleep(0.1)
    assert len(found_at) == 2
    await asyncio.sleep(10)
    node.hint()
    await asyncio.sleep(0.1)
    assert len(found_at) == 3
    await asyncio.sleep(31)
    assert len(found_at) == 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_expensive_findings_are_events_as_soon_as_they_have_lasted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_findings, "_REST_PER_FIND", 1e12)
    events = PodEvents()
    await asyncio.sleep(2)
    node = NodeFindings(lambda: [HOOK], events, PodStore(Conditions()))
    task = asyncio.create_task(node.run())
    async with asyncio.timeout(11):
        assert [event.reason for event in await events.next()] == ["HookMissing"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("guard", GUARDS)
async def test_guard_is_in_force_unless_a_finding_is_that_it_is_not(guard: str) -> None:
    store, now = PodStore(Conditions()), [found(kinds.OFF, "It is off")]
    node = NodeFindings(lambda: now, PodEvents(), store, guards=lambda: {guard})

    async def in_force() -> list[tuple[dict[str, str], float]]:
        await node.refresh()
        _, metric = node.collect()
        return [(sample.labels, sample.value) for sample in metric.samples]

    assert await in_force() == [({"guard": guard}, 1.0)]
    for kind in GUARDS[guard]:
        now[:] = [found(kind, "It is not")]
        assert await in_force() == [({"guard": guard}, 0.0)]
