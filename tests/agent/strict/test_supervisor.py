"""A relay runs for the pods in strict, and each pod has a sentence about why it is bypassed."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping

import pytest
import structlog.testing

from agent import labels
from agent.pods.changes import Subscription
from agent.pods.conditions import Conditions
from agent.pods.pod_modes import PodModes
from agent.pods.pod_state import PathTestResult, PodState
from agent.pods.store import PodStore
from agent.probing.answered_probes import AnsweredProbes
from agent.relay import messages
from agent.strict.process import RelayError
from agent.strict.relayed_pods import RelayAnswers
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import RelaySupervisor
from bpf.verdicts import Mode
from probes.redirection import InnerWay, Redirection
from tests.agent.strict.scripted_relay import ScriptedLauncher, ScriptedPredecessor, ScriptedRelay
from tests.agent.strict.strict_pods import record_path, strict_pod, tcp

pytestmark = pytest.mark.looptime

ONE, OTHER = "198.18.1.1", "198.18.1.2"
STARTING = "the relay is starting."


class Node:
    """Pods, a launcher and the supervisor; `changed` are pods of which it answers differently, and
    `problems` those answers."""

    def __init__(self, default: Mode = Mode.AUDIT) -> None:
        self.modes = PodModes(default)
        self.store = PodStore(Conditions())
        self.store.synced.set()
        self.launcher = ScriptedLauncher()
        self.changed: list[str] = []
        self.problems: list[str | None] = []
        self.has_changed = asyncio.Event()
        self.stats = _Stats(self.store)
        self.answered = AnsweredProbes()
        self.supervisor = RelaySupervisor(
            self.launcher,
            modes=self.modes,
            store=self.store,
            stats=self.stats,
            answered=self.answered,
        )
        self.marks = _Marks(self)
        self.supervisor.pods.changes.subscribe(self.marks)

    def add(self, pod: PodState) -> PodState:
        self.store.pods[pod.pod.uid] = pod
        self.store.desired.mark(pod.pod.uid)
        self.marks.seen[pod.pod.uid] = self.supervisor.pods.answers_for(pod)
        return pod

    def remove(self, pod: PodState) -> None:
        self.store.remove_pod(pod.pod.uid)


class _Marks(Subscription):
    """Compares with what it has seen, as the publisher of conditions does."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self.seen: dict[str, RelayAnswers] = {}

    def mark(self, uid: str) -> None:
        answers = self._node.supervisor.pods.answers_for(self._node.store.pods[uid])
        if answers != self.seen.get(uid):
            self.seen[uid] = answers
            self._node.changed.append(uid)
            pod = self._node.store.pods[uid]
            self._node.problems.append(self._node.supervisor.pods.problem_for(pod))
            self._node.has_changed.set()


class _Stats(ConnectionStats):
    """Counts the reports."""

    reports = 0

    def add(self, samples: Iterable[messages.OutcomeSample]) -> None:
        self.reports += 1
        super().add(samples)


@contextlib.asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    task = asyncio.create_task(node.supervisor.run())
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
        pod = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        assert node.supervisor.pods.problem_for(pod) is None
        node.changed.clear()
        node.problems.clear()
        node.has_changed.clear()
        await test(node, pod)

    begun.__name__ = getattr(test, "__name__", "run")
    return on_a_node(begun)


@on_a_node
async def test_no_relay_runs_without_pods_in_strict(node: Node) -> None:
    node.add(strict_pod("open", ONE, mode=Mode.ENFORCE))
    node.add(strict_pod("idle", OTHER, container={}))
    await asyncio.sleep(5)
    assert node.launcher.tried_at == []
    assert not node.supervisor.is_up
    assert node.supervisor.problem == ""


@on_a_node
async def test_relay_runs_for_a_pod_in_enforce_while_the_kubelet_cannot_reach_it(
    node: Node,
) -> None:
    pod = node.add(strict_pod("web", ONE, mode=Mode.ENFORCE))
    await asyncio.sleep(1)
    assert node.supervisor.pods.problem_for(pod) == "Mode is not strict."
    assert node.launcher.relays == []
    record_path(pod, PathTestResult.UNREACHABLE)
    node.store.in_force.mark(pod.pod.uid)
    await asyncio.sleep(1)
    assert node.supervisor.pods.problem_for(pod) is None
    assert node.supervisor.pods.need_for(pod) == f"The kubelet cannot reach {ONE} from the host"
    assert node.launcher.relays[0].targets() == {ONE}
    node.changed.clear()
    record_path(pod, PathTestResult.CONFIRMED)
    node.store.in_force.mark(pod.pod.uid)
    await asyncio.sleep(1)
    assert node.launcher.relays[0].targets() == set()
    assert node.supervisor.pods.need_for(pod) == ""
    assert pod.pod.uid in node.changed


@on_a_node
async def test_relay_gets_its_targets_and_is_then_engaged(node: Node) -> None:
    pod = node.add(strict_pod("web", ONE))
    assert node.supervisor.pods.problem_for(pod) == STARTING
    await asyncio.sleep(0.5)
    assert node.supervisor.pods.problem_for(pod) is None
    assert node.changed == [pod.pod.uid]
    kinds = [type(message) for message in node.launcher.newest.received]
    assert kinds == [messages.SetTargets, messages.Engage]
    assert node.supervisor.is_up
    assert node.supervisor.restarts == 0


async def test_relay_starts_before_pods_if_strict_is_the_default() -> None:
    async with running(Node(Mode.STRICT)) as node:
        await asyncio.sleep(0.5)
        assert node.supervisor.is_up
        pod = node.add(strict_pod("web", ONE))
        await asyncio.sleep(0.2)
        assert node.supervisor.pods.problem_for(pod) is None


@with_a_relay
async def test_way_to_a_relay_is_tried_before_it_is_engaged_and_then_twice_a_second(
    node: Node, web: PodState
) -> None:
    await asyncio.sleep(10)
    first, *later = node.launcher.newest.way_tries
    assert not first
    assert all(later)
    assert len(later) == pytest.approx(22, abs=2)


@with_a_relay
async def test_bursts_are_one_update(node: Node, web: PodState) -> None:
    for number in range(2, 50):
        node.add(strict_pod(f"web{number}", f"198.18.1.{number}"))
        await asyncio.sleep(0.0005)
    await asyncio.sleep(0.2)
    assert len(node.launcher.newest.updates()) <= 3
    assert len(node.launcher.newest.targets()) == 49


@with_a_relay
async def test_only_targets_of_pods_that_changed_are_sent(node: Node, web: PodState) -> None:
    relay = node.launcher.newest
    other = node.add(strict_pod("other", OTHER))
    await asyncio.sleep(0.2)
    node.remove(web)
    await asyncio.sleep(0.2)
    first, added, removed = relay.updates()
    assert isinstance(first, messages.SetTargets)
    assert isinstance(added, messages.ChangeTargets)
    assert isinstance(removed, messages.ChangeTargets)
    assert ([one.address for one in added.changed], added.removed) == ([OTHER], ())
    assert (removed.changed, removed.removed) == ((), (first.targets[0].key,))
    assert relay.targets() == {OTHER}
    assert node.supervisor.pods.problem_for(other) is None


@with_a_relay
async def test_target_that_the_relay_lost_is_back_within_half_a_minute(
    node: Node, web: PodState
) -> None:
    relay = node.launcher.newest
    relay.lose_targets()
    await asyncio.sleep(32)
    assert relay.targets() == {ONE}
    assert len(relay.updates()) == 2
    assert len(node.launcher.relays) == 1
    assert node.supervisor.pods.problem_for(web) is None


@with_a_relay
async def test_rejected_target_is_sent_again_with_the_next_change(
    node: Node, web: PodState
) -> None:
    relay = node.launcher.newest
    first = relay.updates()[0]
    assert isinstance(first, messages.SetTargets)
    [target] = first.targets
    rejected = target.key.replace(web.pod.uid, "uid-other").replace(ONE, OTHER)
    relay.rejects[rejected] = "No room."
    other = node.add(strict_pod("other", OTHER))
    await asyncio.sleep(0.2)
    assert "No room." in (node.supervisor.pods.problem_for(other) or "")
    relay.rejects.clear()
    node.add(strict_pod("third", "198.18.1.3"))
    await asyncio.sleep(0.2)
    assert node.supervisor.pods.problem_for(other) is None


@with_a_relay
async def test_targets_are_not_planned_again_each_second_without_a_change(
    node: Node, web: PodState
) -> None:
    plans = node.supervisor._plans
    updates: list[Collection[str] | None] = []

    def update(
        pods: Mapping[str, PodState],
        changed: Collection[str] | None = None,
        *,
        proxies_enforced: bool,
    ) -> set[str]:
        updates.append(changed)
        return plans_of_all(pods, changed, proxies_enforced=proxies_enforced)

    plans_of_all = plans.update
    plans.update = update  # type: ignore[method-assign,assignment]
    await asyncio.sleep(60)
    assert 1 <= len(updates) <= 3
    assert set(updates) == {None}
    # A change without a mark.
    node.store.pods["uid-new"] = strict_pod("new", OTHER)
    await asyncio.sleep(35)
    assert len(node.launcher.newest.targets()) == 2
    node.add(strict_pod("third", "198.18.1.3"))
    await asyncio.sleep(1)
    assert len(node.launcher.newest.targets()) == 3


@with_a_relay
async def test_new_pod_reports_that_the_relay_is_not_updated_yet(node: Node, web: PodState) -> None:
    pod = node.add(strict_pod("new", OTHER))
    assert node.supervisor.pods.problem_for(pod) == "the relay is not updated yet."
    await asyncio.sleep(0.2)
    assert node.supervisor.pods.problem_for(pod) is None
    assert node.changed == [pod.pod.uid]


@with_a_relay
async def test_new_sandbox_of_a_pod_is_a_new_target(node: Node, web: PodState) -> None:
    again = strict_pod("web", ONE)
    assert again.netns is not None
    netns = type(again.netns)(again.netns.path, again.netns.device, 4711)
    again.netns = again.gated_netns = netns
    node.add(again)
    assert node.supervisor.pods.problem_for(again) is not None
    await asyncio.sleep(0.2)
    assert node.supervisor.pods.problem_for(again) is None


@on_a_node
async def test_rejected_target_is_reported_with_the_relays_sentence(node: Node) -> None:
    class Picky(ScriptedRelay):
        def __init__(self) -> None:
            super().__init__()
            self.rejects = {f"uid-web {ONE}": "no address is left"}

    node.launcher.next = Picky
    pod, other = node.add(strict_pod("web", ONE)), node.add(strict_pod("db", OTHER))
    await asyncio.sleep(0.5)
    assert node.supervisor.pods.problem_for(pod) == f"the relay rejects {ONE}: no address is left."
    assert node.supervisor.pods.problem_for(other) is None


@with_a_relay
async def test_pods_with_a_conflict_report_it_and_others_are_proxied(
    node: Node, web: PodState
) -> None:
    twins = [node.add(strict_pod(name, OTHER, container=tcp(80))) for name in ("a", "b")]
    await asyncio.sleep(0.2)
    for twin, other in zip(twins, reversed(twins), strict=True):
        problem = node.supervisor.pods.problem_for(twin)
        assert problem is not None
        assert f"Pod {other.pod.full_name} has the same address" in problem
    assert node.supervisor.pods.problem_for(web) is None


@with_a_relay
async def test_relay_that_exits_is_reported_and_started_again(node: Node, web: PodState) -> None:
    node.launcher.newest.exit()
    await asyncio.sleep(0.01)
    assert (node.supervisor.is_up, node.supervisor.problem) == (
        False,
        "the relay failed: it exited.",
    )
    await asyncio.sleep(0.2)
    assert node.problems == ["the relay failed: it exited.", None]
    assert node.launcher.relays[0].is_killed
    assert node.supervisor.pods.problem_for(web) is None
    assert node.supervisor.restarts == 1


@with_a_relay
async def test_failed_relay_reports_why(node: Node, web: PodState) -> None:
    node.launcher.newest.send(messages.RelayFailed("no descriptor is left"))
    await asyncio.sleep(0.2)
    assert node.problems == ["the relay failed: no descriptor is left.", None]


@with_a_relay
async def test_relay_that_the_node_does_not_reach_is_released_within_a_second(
    node: Node, web: PodState
) -> None:
    relay = node.launcher.newest
    relay.way_problem = "packets are not answered"
    async with asyncio.timeout(1):
        await node.has_changed.wait()
    why = "the node does not reach the relay: packets are not answered."
    assert node.supervisor.pods.problem_for(web) == why
    await asyncio.sleep(0.1)
    # It still has open connections.
    assert relay.has_received(messages.Release)
    assert not relay.is_killed


@with_a_relay
async def test_relay_gets_no_connection_until_the_node_reaches_it(
    node: Node, web: PodState
) -> None:
    """The relay before redirects to the next one as soon as that has targets."""

    class Blocked(ScriptedRelay):
        async def find_way_problem(self, *, is_engaged: bool) -> str:
            return "blocked"

    node.launcher.next = Blocked
    node.launcher.newest.way_problem = "blocked"
    await asyncio.sleep(10)
    started = node.launcher.relays[1:]
    assert len(started) >= 2
    assert all(relay.is_killed for relay in started)
    assert not any(relay.has_received(messages.SetTargets) for relay in started)
    assert not any(relay.has_received(messages.Engage) for relay in started)
    node.launcher.next = ScriptedRelay
    await asyncio.sleep(30)
    assert node.supervisor.pods.problem_for(web) is None


@with_a_relay
async def test_gates_of_relays_are_checked_each_second(node: Node, web: PodState) -> None:
    node.launcher.checks = 0
    await asyncio.sleep(10)
    assert 9 <= node.launcher.checks <= 11


@with_a_relay
async def test_silent_relay_is_killed_and_replaced(node: Node, web: PodState) -> None:
    node.launcher.newest.is_hung = True
    hung_at = asyncio.get_running_loop().time()
    async with asyncio.timeout(5):
        await node.has_changed.wait()
    # A report that is late is none of a silent relay.
    assert asyncio.get_running_loop().time() - hung_at > 3.5
    assert node.supervisor.pods.problem_for(web) == "the relay does not respond."
    assert node.launcher.relays[0].is_killed
    await asyncio.sleep(3)
    assert node.supervisor.pods.problem_for(web) is None


@with_a_relay
async def test_many_passes_are_not_many_checks_of_a_relay_that_reports(
    node: Node, web: PodState
) -> None:
    for _ in range(50):
        node.store.desired.mark(web.pod.uid)
        await asyncio.sleep(0.06)
    assert node.supervisor.pods.problem_for(web) is None
    assert len(node.launcher.relays) == 1


@with_a_relay
async def test_relay_that_does_not_respond_is_replaced(node: Node, web: PodState) -> None:
    node.launcher.newest.is_hung = True
    pod = node.add(strict_pod("new", OTHER))
    await asyncio.sleep(10.5)
    assert node.launcher.relays[0].is_killed
    await asyncio.sleep(3)
    assert node.supervisor.pods.problem_for(pod) is None


@with_a_relay
async def test_relay_that_sends_an_invalid_message_is_replaced(node: Node, web: PodState) -> None:
    node.launcher.newest._writer.write(b"\x00\x00\x00\x02{]")
    await asyncio.sleep(0.2)
    problem, after = node.problems
    assert problem is not None
    assert "sent an invalid message" in problem
    assert after is None


@on_a_node
async def test_retry_delay_doubles_up_to_eight_seconds(node: Node) -> None:
    node.launcher.problem = "the range is in use"
    pod = node.add(strict_pod("web", ONE))
    with structlog.testing.capture_logs() as lines:
        await asyncio.sleep(120)
    assert [line["log_level"] for line in lines].count("error") == 1
    problem = "the relay cannot be started: the range is in use."
    assert node.supervisor.pods.problem_for(pod) == problem
    assert node.supervisor.problem == problem
    tried = node.launcher.tried_at
    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    # Passes are a second apart, so a retry may be that much later.
    for wait, least in zip(waits, (1, 2, 4, 8, 8, 8, 8), strict=False):
        assert least - 0.01 <= wait <= least + 1.1
    assert len(waits) >= 6
    node.launcher.problem = None
    await asyncio.sleep(10)
    assert node.supervisor.pods.problem_for(pod) is None


@with_a_relay
async def test_first_relay_that_fails_is_replaced_at_once_and_the_next_after_a_delay(
    node: Node, web: PodState
) -> None:
    """Until then a mesh in the pod rejects the kubelet's probes."""
    node.launcher.newest.exit()
    await asyncio.sleep(0.1)
    assert len(node.launcher.relays) == 2
    assert node.supervisor.pods.problem_for(web) is None
    node.launcher.newest.exit()
    await asyncio.sleep(1.5)
    assert len(node.launcher.relays) == 2
    await asyncio.sleep(1.5)
    assert len(node.launcher.relays) == 3
    assert node.supervisor.pods.problem_for(web) is None


@with_a_relay
async def test_retry_delay_is_reset_after_a_healthy_minute(node: Node, web: PodState) -> None:
    for _ in range(3):
        node.launcher.newest.exit()
        await asyncio.sleep(10)
    await asyncio.sleep(62)
    relays = len(node.launcher.relays)
    node.launcher.newest.exit()
    await asyncio.sleep(2.5)
    assert len(node.launcher.relays) == relays + 1
    # No other one was healthy for so long.
    waits = []
    for _ in range(3):
        exited_at = asyncio.get_running_loop().time()
        node.launcher.newest.exit()
        await asyncio.sleep(12)
        waits.append(node.launcher.tried_at[-1] - exited_at)
    assert [round(wait) for wait in waits] == pytest.approx([2, 4, 8], abs=1)


@with_a_relay
async def test_routes_of_ranges_are_restored_twice_a_minute(node: Node, web: PodState) -> None:
    node.launcher.ranges = 0
    await asyncio.sleep(120)
    assert node.launcher.ranges == 4


@with_a_relay
async def test_pod_whose_target_has_changed_waits_for_the_relay(node: Node, web: PodState) -> None:
    node.launcher.newest.is_hung = True
    web.inner_ways = {ONE: InnerWay(Redirection(15001, 5995, "Consul"), 5995)}
    node.store.in_force.mark(web.pod.uid)
    new = node.add(strict_pod("new", OTHER))
    await asyncio.sleep(1)
    for pod in (web, new):
        assert node.supervisor.pods.problem_for(pod) == "the relay is not updated yet."


@with_a_relay
async def test_range_that_cannot_be_restored_is_reported(node: Node, web: PodState) -> None:
    node.launcher.range_problem = "the relay's range cannot be set apart"
    await asyncio.sleep(35)
    problem = node.supervisor.pods.problem_for(web)
    assert problem is not None
    assert "the relay's range cannot be set apart" in problem


@with_a_relay
async def test_handover_engages_the_new_relay_before_the_old_is_released(
    node: Node, web: PodState
) -> None:
    old = node.launcher.newest
    async with asyncio.timeout(0.2):
        await node.supervisor.restart()
    new = node.launcher.newest
    assert new is not old
    assert new.has_received(messages.Engage)
    assert new.targets() == {ONE}
    await asyncio.sleep(0.1)
    assert old.has_received(messages.Release)
    assert not old.is_killed
    assert node.supervisor.pods.problem_for(web) is None
    assert node.changed == []
    assert node.supervisor.restarts == 1
    old.exit()
    await asyncio.sleep(2)
    assert node.supervisor.is_up


@with_a_relay
async def test_released_relay_that_does_not_exit_is_killed(node: Node, web: PodState) -> None:
    old = node.launcher.newest
    await node.supervisor.restart()
    await asyncio.sleep(30)
    assert node.launcher.killed() == []
    await asyncio.sleep(15)
    assert node.launcher.killed() == [old]
    assert node.supervisor.is_up


@with_a_relay
async def test_old_relay_stays_if_the_new_one_fails_and_gets_all_targets_again(
    node: Node, web: PodState
) -> None:
    old = node.launcher.newest
    node.launcher.problem = "no slot is free"
    with pytest.raises(RelayError, match="no slot is free"):
        await node.supervisor.restart()
    await asyncio.sleep(0.2)
    assert isinstance(old.received[-1], messages.SetTargets)
    assert not old.has_received(messages.Release)
    assert node.supervisor.pods.problem_for(web) is None


async def test_restart_that_an_agent_has_no_time_for_is_rejected() -> None:
    class Hung(ScriptedRelay):
        def __init__(self) -> None:
            super().__init__()
            self.is_hung = True

    node = Node()
    async with running(node):
        node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        node.launcher.next = Hung
        restarting = asyncio.create_task(node.supervisor.restart())
        await asyncio.sleep(1)
    with pytest.raises(RelayError, match="the agent is stopping"):
        await restarting


@on_a_node
async def test_restart_without_pods_in_strict_is_rejected(node: Node) -> None:
    with pytest.raises(RelayError, match="no pod is in strict"):
        await node.supervisor.restart()


@with_a_relay
async def test_relay_is_released_a_while_after_the_last_pod(node: Node, web: PodState) -> None:
    relay = node.launcher.newest
    await asyncio.sleep(100)
    node.remove(web)
    await asyncio.sleep(50)
    assert relay.targets() == set()
    assert not relay.has_received(messages.Release)
    await asyncio.sleep(15)
    assert relay.has_received(messages.Release)
    assert not node.supervisor.is_up
    assert node.supervisor.problem == ""


@with_a_relay
async def test_relay_is_released_at_once_when_podgate_is_switched_off(
    node: Node, web: PodState
) -> None:
    relay = node.launcher.newest
    node.remove(web)
    node.modes.set_off(is_off=True)
    await asyncio.sleep(0.2)
    assert relay.has_received(messages.Release)
    assert not node.supervisor.is_up


@with_a_relay
async def test_pod_that_comes_back_in_time_finds_the_same_relay(node: Node, web: PodState) -> None:
    node.remove(web)
    await asyncio.sleep(40)
    node.add(web)
    await asyncio.sleep(40)
    assert node.supervisor.pods.problem_for(web) is None
    assert len(node.launcher.relays) == 1


async def test_stopping_agent_leaves_its_relay_alone() -> None:
    node = Node()
    async with running(node):
        node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
    (relay,) = node.launcher.relays
    assert relay.is_released
    async with running(Node()):  # lets the loop read what was written
        await asyncio.sleep(0.1)
    assert not relay.has_received(messages.Release)


def with_a_predecessor(
    test: Callable[[Node, ScriptedPredecessor], Awaitable[None]],
) -> Callable[[], Awaitable[None]]:
    """On a node where the relay of a previous agent proxies to one address."""

    async def run() -> None:
        node = Node()
        node.launcher.predecessors = [predecessor := ScriptedPredecessor()]
        node.launcher.addresses = {ONE}
        async with running(node):
            await test(node, predecessor)

    run.__name__ = getattr(test, "__name__", "run")
    return run


@with_a_predecessor
async def test_relay_takes_over_from_the_one_of_the_previous_agent(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    await asyncio.sleep(1)
    assert not predecessor.is_released
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(1)
    assert node.launcher.newest.has_received(messages.Engage)
    assert predecessor.is_released


async def test_agent_that_stops_leaves_the_previous_relay_alone() -> None:
    node = Node()
    node.launcher.predecessors = [predecessor := ScriptedPredecessor()]
    node.launcher.addresses = {ONE}
    async with running(node):
        await asyncio.sleep(1)
    assert predecessor.is_forgotten
    assert not predecessor.is_released


@with_a_predecessor
async def test_relay_does_not_take_over_before_it_has_all_targets(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    node.add(strict_pod("other", OTHER))
    await asyncio.sleep(4)
    assert node.launcher.relays == []
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(1)
    assert node.launcher.newest.targets() == {ONE, OTHER}
    assert predecessor.is_released


@with_a_predecessor
async def test_relay_waits_no_longer_for_the_target_of_a_pod_that_has_changed(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    node.add(strict_pod("other", OTHER))
    await asyncio.sleep(7)
    assert node.supervisor.is_up
    assert predecessor.is_released


@with_a_predecessor
async def test_previous_relay_continues_while_no_other_can_be_started(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    node.launcher.problem = "no slot is free"
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(60)
    assert not predecessor.is_released


@with_a_predecessor
async def test_previous_relay_is_released_if_the_next_one_fails_with_its_targets(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    """Its hooks would redirect to a relay that does not run."""

    class Hung(ScriptedRelay):
        def __init__(self) -> None:
            super().__init__()
            self.is_hung = True

    node.launcher.next = Hung
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(9)
    assert not predecessor.is_released
    await asyncio.sleep(3)
    assert node.launcher.killed() == node.launcher.relays[:1]
    assert predecessor.is_released


@with_a_predecessor
async def test_previous_relay_serves_while_the_way_to_the_next_one_is_blocked(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    """It tries its own."""

    class Blocked(ScriptedRelay):
        def __init__(self) -> None:
            super().__init__()
            self.way_problem = "packets are not answered"

    node.launcher.next = Blocked
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(20)
    assert len(node.launcher.killed()) > 1
    assert not predecessor.is_released


@with_a_predecessor
async def test_previous_relay_is_released_if_no_pod_needs_one(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    await asyncio.sleep(7)
    assert predecessor.is_released
    assert node.launcher.relays == []


@with_a_predecessor
async def test_previous_relay_is_not_released_before_all_pods_are_read(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    node.store.synced.clear()
    await asyncio.sleep(50)
    assert not predecessor.is_released
    node.store.synced.set()
    await asyncio.sleep(7)
    assert predecessor.is_released


@with_a_predecessor
async def test_previous_relay_is_released_at_once_while_podgate_is_off(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    node.modes.set_off(is_off=True)
    await asyncio.sleep(2)
    assert predecessor.is_released


@with_a_predecessor
async def test_previous_relay_that_does_not_exit_is_killed(
    node: Node, predecessor: ScriptedPredecessor
) -> None:
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(35)
    assert predecessor.is_running
    await asyncio.sleep(10)
    assert not predecessor.is_running


async def test_relay_of_another_version_continues_until_all_are_planned() -> None:
    """Its targets are in other maps, so nothing shows which pods are missing."""
    node = Node()
    node.launcher.predecessors = [predecessor := ScriptedPredecessor()]
    node.launcher.have_these_maps = False
    async with running(node):
        node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        assert node.supervisor.is_up
        assert not predecessor.is_released
        await asyncio.sleep(6)
        assert predecessor.is_released


@with_a_relay
async def test_reports_of_a_draining_relay_are_counted(node: Node, web: PodState) -> None:
    old = node.launcher.newest
    await node.supervisor.restart()
    before = node.stats.reports
    await asyncio.sleep(3.5)
    assert node.stats.reports - before >= 6  # each reports once a second
    assert sum(report.connections for report in node.supervisor.last_reports) == 2
    old.exit()
    await asyncio.sleep(2)
    assert sum(report.connections for report in node.supervisor.last_reports) == 1


@on_a_node
async def test_restart_of_a_relay_that_cannot_start_reports_why(node: Node) -> None:
    node.launcher.problem = "no slot is free"
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(1)
    async with asyncio.timeout(60):
        with pytest.raises(RelayError, match="no slot is free"):
            await node.supervisor.restart()


@on_a_node
async def test_restart_waits_for_a_relay_that_could_not_be_started_before(node: Node) -> None:
    node.launcher.problem = "no slot is free"
    node.add(strict_pod("web", ONE))
    await asyncio.sleep(5)
    node.launcher.problem = None
    await asyncio.wait_for(node.supervisor.restart(), 10)
    assert node.supervisor.is_up
    assert len(node.launcher.relays) == 1


@on_a_node
async def test_restart_that_no_pod_needs_any_more_is_rejected(node: Node) -> None:
    node.launcher.problem = "no slot is free"
    web = node.add(strict_pod("web", ONE))
    await asyncio.sleep(10)
    restarting = asyncio.create_task(node.supervisor.restart())
    await asyncio.sleep(0)
    node.remove(web)
    with pytest.raises(RelayError, match="no pod is in strict"):
        await asyncio.wait_for(restarting, 1)


@on_a_node
async def test_relay_starts_once_the_nodes_default_becomes_strict(node: Node) -> None:
    await asyncio.sleep(1)
    assert node.launcher.relays == []
    node.modes.set_node({labels.MODE_LABEL: "strict"})
    await asyncio.sleep(1)
    assert node.supervisor.is_up


@with_a_relay
async def test_relays_answers_are_counted(node: Node, web: PodState) -> None:
    answer = messages.AnswerSample(f"{web.pod.uid} {ONE}", 8080, "healthy", 3)
    node.launcher.newest.send(
        messages.RelayReport(
            connections=0, held_syns=0, is_full=False, samples=(), answers=(answer,)
        )
    )
    await asyncio.sleep(1)
    counted = [(pod.name, outcome, count) for pod, _, outcome, count in node.stats.answers.items()]
    assert counted == [("web", "healthy", 3)]


@with_a_relay
async def test_connections_of_a_removed_pod_are_forgotten(node: Node, web: PodState) -> None:
    buckets = (0,) * len(messages.OPEN_BUCKETS)
    key = f"{web.pod.uid} {ONE}"
    sample = messages.OutcomeSample(key, 8080, "proxied", 2, 0.5, buckets)
    node.launcher.newest.send(messages.RelayReport(0, 0, False, (sample,)))
    await asyncio.sleep(15)
    assert [one.outcomes for one in node.stats.status(web.pod.uid)] == [{"proxied": 2}]
    node.remove(web)
    await asyncio.sleep(15)
    assert node.stats.status(web.pod.uid) == []


@with_a_relay
async def test_relay_that_closes_its_channel_has_exited(node: Node, web: PodState) -> None:
    """Without a reset, as when it had read everything."""
    node.launcher.newest.end_channel()
    await asyncio.sleep(0.2)
    assert node.problems == ["the relay failed: it exited.", None]
