"""A relay is kept for the pods in strict, and each pod says at any time whether it has it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import pytest

from agent.pods.changes import Subscription
from agent.pods.conditions import Conditions
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.relay import messages
from agent.strict.process import RelayError
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import Relaying
from bpf.verdicts import Mode
from tests.agent.strict.scripted_relay import ScriptedLauncher, ScriptedRelay
from tests.agent.strict.strict_pods import guarded, tcp

pytestmark = pytest.mark.looptime

ONE, OTHER = "198.18.1.1", "198.18.1.2"
STARTING = "the relay is starting."


class Node:
    """Pods, a launcher and the one who keeps a relay; `changed` are pods with something new."""

    def __init__(self, *, is_default: bool = False) -> None:
        self.store = PodStore(Conditions())
        self.launcher = ScriptedLauncher()
        self.changed: list[str] = []
        self.has_changed = asyncio.Event()
        self.stats = _Stats(self.store)
        self.relaying = Relaying(
            self.launcher,
            is_default=is_default,
            store=self.store,
            stats=self.stats,
        )
        self.store.in_force.subscribe(_Marks(self))

    def add(self, pod: PodState) -> PodState:
        self.store.pods[pod.pod.uid] = pod
        self.store.desired.mark(pod.pod.uid)
        self.relaying.why_not(pod)
        return pod

    def remove(self, pod: PodState) -> None:
        self.store.remove_pod(pod.pod.uid)


class _Marks(Subscription):
    """Publishes a pod's condition at once when it is marked."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def mark(self, uid: str) -> None:
        self._node.changed.append(uid)
        self._node.has_changed.set()
        self._node.relaying.why_not(self._node.store.pods[uid])


class _Stats(ConnectionStats):
    """Counts the reports."""

    reports = 0

    def add(self, samples: Iterable[messages.OutcomeSample]) -> None:
        self.reports += 1
        super().add(samples)


@contextlib.asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    task = asyncio.create_task(node.relaying.run())
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await node.launcher.close()


def on_a_node(test: Callable[[Node], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Not a fixture: in those time is not faked."""

    async def run() -> None:
        async with running(Node()) as node:
            await test(node)

    run.__name__ = getattr(test, "__name__", "run")
    return run


def with_a_relay(
    test: Callable[[Node, PodState], Awaitable[None]],
) -> Callable[[], Awaitable[None]]:
    """On a node with a pod in strict that has its relay."""

    async def begun(node: Node) -> None:
        pod = node.add(guarded("web", ONE))
        await asyncio.sleep(1)
        assert node.relaying.why_not(pod) is None
        node.changed.clear()
        node.has_changed.clear()
        await test(node, pod)

    begun.__name__ = getattr(test, "__name__", "run")
    return on_a_node(begun)


@on_a_node
async def test_no_relay_runs_where_nobody_wants_it(node: Node) -> None:
    node.add(guarded("open", ONE, mode=Mode.ENFORCE))
    node.add(guarded("idle", OTHER, container={}))
    await asyncio.sleep(5)
    assert node.launcher.tried_at == []
    assert not node.relaying.is_up
    assert node.relaying.trouble == ""


@on_a_node
async def test_pod_is_told_to_a_relay_that_is_engaged_then(node: Node) -> None:
    pod = node.add(guarded("web", ONE))
    assert node.relaying.why_not(pod) == STARTING
    await asyncio.sleep(0.5)
    assert node.relaying.why_not(pod) is None
    assert node.changed == [pod.pod.uid]
    kinds = [type(message) for message in node.launcher.newest.heard]
    assert kinds == [messages.SetTargets, messages.Engage]
    assert node.relaying.is_up


async def test_where_strict_is_the_default_the_relay_is_there_before_pods() -> None:
    async with running(Node(is_default=True)) as node:
        await asyncio.sleep(0.5)
        assert node.relaying.is_up
        pod = node.add(guarded("web", ONE))
        await asyncio.sleep(0.2)
        assert node.relaying.why_not(pod) is None


@with_a_relay
async def test_bursts_are_told_once(node: Node, web: PodState) -> None:
    for number in range(2, 50):
        node.add(guarded(f"web{number}", f"198.18.1.{number}"))
        await asyncio.sleep(0.0005)
    await asyncio.sleep(0.2)
    wants = [m for m in node.launcher.newest.heard if isinstance(m, messages.SetTargets)]
    assert len(wants) <= 3
    assert len(node.launcher.newest.wanted()) == 49


@with_a_relay
async def test_new_pod_says_that_the_relay_has_still_to_hear_of_it(
    node: Node, web: PodState
) -> None:
    pod = node.add(guarded("new", OTHER))
    assert node.relaying.why_not(pod) == "the relay has still to hear of this pod."
    await asyncio.sleep(0.2)
    assert node.relaying.why_not(pod) is None
    assert node.changed == [pod.pod.uid]


@with_a_relay
async def test_pod_of_another_sandbox_is_told_anew(node: Node, web: PodState) -> None:
    again = guarded("web", ONE)
    assert again.netns is not None
    netns = type(again.netns)(again.netns.path, again.netns.device, 4711)
    again.netns = again.gated_netns = netns
    node.add(again)
    assert node.relaying.why_not(again) is not None
    await asyncio.sleep(0.2)
    assert node.relaying.why_not(again) is None


@on_a_node
async def test_refused_target_is_said_with_the_relays_sentence(node: Node) -> None:
    class Picky(ScriptedRelay):
        def __init__(self) -> None:
            super().__init__()
            self.refuses = {f"uid-web {ONE}": "no address is left"}

    node.launcher.next = Picky
    pod, other = node.add(guarded("web", ONE)), node.add(guarded("db", OTHER))
    await asyncio.sleep(0.5)
    assert node.relaying.why_not(pod) == f"the relay refuses {ONE}: no address is left."
    assert node.relaying.why_not(other) is None


@with_a_relay
async def test_pods_that_share_a_port_say_so_and_others_are_carried(
    node: Node, web: PodState
) -> None:
    twins = [node.add(guarded(name, OTHER, container=tcp(80))) for name in ("a", "b")]
    await asyncio.sleep(0.2)
    for twin, other in zip(twins, reversed(twins), strict=True):
        said = node.relaying.why_not(twin)
        assert said is not None
        assert f"pod {other.pod.full_name} of this node has the address" in said
    assert node.relaying.why_not(web) is None


@with_a_relay
async def test_relay_that_ends_is_said_at_once_and_started_again(node: Node, web: PodState) -> None:
    node.launcher.newest.end()
    await asyncio.sleep(0.2)
    assert node.relaying.why_not(web) == "the relay failed: it ended."
    assert node.changed == [web.pod.uid]
    assert node.launcher.relays[0].is_killed
    await asyncio.sleep(3)
    assert node.relaying.why_not(web) is None
    assert node.relaying.restarts == 1


@with_a_relay
async def test_relay_that_fails_says_why(node: Node, web: PodState) -> None:
    node.launcher.newest.say(messages.RelayFailed("no descriptor is left"))
    await asyncio.sleep(0.2)
    assert node.relaying.why_not(web) == "the relay failed: no descriptor is left."


@with_a_relay
async def test_relay_that_reports_no_more_is_ended_and_replaced(node: Node, web: PodState) -> None:
    node.launcher.newest.is_hung = True
    async with asyncio.timeout(5):
        await node.has_changed.wait()
    assert node.relaying.why_not(web) == "the relay does not answer."
    assert node.launcher.relays[0].is_killed
    await asyncio.sleep(3)
    assert node.relaying.why_not(web) is None


@with_a_relay
async def test_many_hints_are_not_many_looks_at_a_relay_that_reports(
    node: Node, web: PodState
) -> None:
    for _ in range(50):
        node.store.desired.mark(web.pod.uid)
        await asyncio.sleep(0.06)
    assert node.relaying.why_not(web) is None
    assert len(node.launcher.relays) == 1


@with_a_relay
async def test_relay_that_does_not_answer_a_question_is_replaced(node: Node, web: PodState) -> None:
    node.launcher.newest.is_hung = True
    pod = node.add(guarded("new", OTHER))
    await asyncio.sleep(10.5)
    assert node.launcher.relays[0].is_killed
    await asyncio.sleep(3)
    assert node.relaying.why_not(pod) is None


@with_a_relay
async def test_relay_that_says_nonsense_is_replaced(node: Node, web: PodState) -> None:
    node.launcher.newest._writer.write(b"\x00\x00\x00\x02{]")
    await asyncio.sleep(0.2)
    said = node.relaying.why_not(web)
    assert said is not None
    assert "says what nobody understands" in said


@on_a_node
async def test_waits_between_tries_double_up_to_half_a_minute(node: Node) -> None:
    node.launcher.problem = "the range is taken"
    pod = node.add(guarded("web", ONE))
    await asyncio.sleep(120)
    said = "the relay cannot be started: the range is taken."
    assert node.relaying.why_not(pod) == said
    assert node.relaying.trouble == said
    tried = node.launcher.tried_at
    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    # Looks are a second apart, so a try may come that much later.
    for wait, least in zip(waits, (1, 2, 4, 8, 16, 30, 30), strict=False):
        assert least - 0.01 <= wait <= least + 1.1
    assert len(waits) >= 6
    node.launcher.problem = None
    await asyncio.sleep(32)
    assert node.relaying.why_not(pod) is None


@with_a_relay
async def test_after_a_minute_of_health_the_first_wait_is_short_again(
    node: Node, web: PodState
) -> None:
    for _ in range(3):
        node.launcher.newest.end()
        await asyncio.sleep(10)
    await asyncio.sleep(62)
    relays = len(node.launcher.relays)
    node.launcher.newest.end()
    await asyncio.sleep(2.5)
    assert len(node.launcher.relays) == relays + 1


@with_a_relay
async def test_range_that_cannot_be_kept_is_said(node: Node, web: PodState) -> None:
    node.launcher.range_problem = "the relay's range cannot be set apart"
    await asyncio.sleep(35)
    said = node.relaying.why_not(web)
    assert said is not None
    assert "the relay's range cannot be set apart" in said


@with_a_relay
async def test_hand_over_engages_the_new_one_before_the_old_is_released(
    node: Node, web: PodState
) -> None:
    old = node.launcher.newest
    await node.relaying.restart()
    new = node.launcher.newest
    assert new is not old
    assert new.has_heard(messages.Engage)
    assert new.wanted() == {ONE}
    await asyncio.sleep(0.1)
    assert old.has_heard(messages.Release)
    assert not old.is_killed
    assert node.relaying.why_not(web) is None
    assert node.changed == []
    assert node.relaying.restarts == 1
    old.end()
    await asyncio.sleep(2)
    assert node.relaying.is_up


@with_a_relay
async def test_released_relay_that_does_not_end_is_ended(node: Node, web: PodState) -> None:
    old = node.launcher.newest
    await node.relaying.restart()
    await asyncio.sleep(30)
    assert node.launcher.killed() == []
    await asyncio.sleep(15)
    assert node.launcher.killed() == [old]
    assert node.relaying.is_up


@with_a_relay
async def test_old_relay_stays_where_the_new_one_fails_and_is_told_all_again(
    node: Node, web: PodState
) -> None:
    old = node.launcher.newest
    node.launcher.problem = "no slot is free"
    with pytest.raises(RelayError, match="no slot is free"):
        await node.relaying.restart()
    await asyncio.sleep(0.2)
    assert isinstance(old.heard[-1], messages.SetTargets)
    assert not old.has_heard(messages.Release)
    assert node.relaying.why_not(web) is None


@on_a_node
async def test_restart_without_pods_in_strict_is_refused(node: Node) -> None:
    with pytest.raises(RelayError, match="no pod is in strict"):
        await node.relaying.restart()


@with_a_relay
async def test_relay_is_released_a_while_after_the_last_pod(node: Node, web: PodState) -> None:
    relay = node.launcher.newest
    node.remove(web)
    await asyncio.sleep(50)
    assert relay.wanted() == set()
    assert not relay.has_heard(messages.Release)
    await asyncio.sleep(15)
    assert relay.has_heard(messages.Release)
    assert not node.relaying.is_up
    assert node.relaying.trouble == ""


@with_a_relay
async def test_pod_that_comes_back_in_time_finds_the_same_relay(node: Node, web: PodState) -> None:
    node.remove(web)
    await asyncio.sleep(40)
    node.add(web)
    await asyncio.sleep(40)
    assert node.relaying.why_not(web) is None
    assert len(node.launcher.relays) == 1


async def test_at_the_agents_end_the_relay_is_released_and_left_alone() -> None:
    node = Node()
    async with running(node):
        node.add(guarded("web", ONE))
        await asyncio.sleep(1)
    (relay,) = node.launcher.relays
    assert relay.is_left
    async with running(Node()):  # lets the loop read what was written
        await asyncio.sleep(0.1)
    assert relay.has_heard(messages.Release) or relay.is_killed


@with_a_relay
async def test_reports_come_through_also_of_one_that_drains(node: Node, web: PodState) -> None:
    old = node.launcher.newest
    await node.relaying.restart()
    before = node.stats.reports
    await asyncio.sleep(3.5)
    assert node.stats.reports - before >= 6  # each says something once a second
    assert sum(report.connections for report in node.relaying.last_reports) == 2
    old.end()
    await asyncio.sleep(2)
    assert sum(report.connections for report in node.relaying.last_reports) == 1
