"""Conditions of pods follow the store, and what the relay answers for each."""

import pytest

from agent import labels
from agent.app.isolation_conditions import IsolationConditions
from agent.pods.conditions import TRUE, Conditions
from agent.pods.isolation import ENFORCED
from agent.pods.pod_state import IsolationStatus, PathTestResult, PodState
from agent.pods.store import PodStore
from agent.strict.relayed_pods import RelayedPods
from bpf.verdicts import Mode
from tests.agent.strict.strict_pods import record_path, strict_pod

pytestmark = pytest.mark.looptime


class Node:
    """A relay that never serves, for the reason `problem`; `changed`: whose condition changed."""

    has_fallback = True

    def __init__(self) -> None:
        self.problem = "the relay is starting."
        self.conditions = Conditions()
        self.changed = self.conditions.changes.subscribe()
        self.store = PodStore(self.conditions)
        self.pods = RelayedPods(self.store, lambda: self.problem)
        self.published = IsolationConditions(self.store, self, self)  # type: ignore[arg-type]

    def problem_for(self, state: PodState) -> str:
        """Of open ports."""
        return ""

    def add(self, state: PodState) -> None:
        state.status = IsolationStatus(TRUE, ENFORCED, "Enforced.")
        record_path(state, PathTestResult.CONFIRMED)
        self.store.pods[state.pod.uid] = state
        self.store.in_force.mark(state.pod.uid)
        self.published.publish()
        self.changed.take()

    def message(self, state: PodState) -> str:
        condition = self.conditions.get(state.pod.uid, labels.ISOLATION_READY)
        assert condition is not None
        return condition.message


@pytest.fixture
async def node() -> Node:
    return Node()


async def test_relay_that_answers_differently_changes_conditions_of_its_pods_alone(
    node: Node,
) -> None:
    strict = strict_pod("web", "198.18.1.1")
    enforced = strict_pod("other", "198.18.1.2", mode=Mode.ENFORCE)
    node.add(strict)
    node.add(enforced)
    node.problem = "the relay does not respond."
    node.pods.publish_all()
    node.published.publish()
    assert node.changed.take() == [strict.pod.uid]
    assert node.problem in node.message(strict)


async def test_answer_that_was_shown_meanwhile_is_replaced(node: Node) -> None:
    """The relay fails and recovers between two of its own reports."""
    pod = strict_pod("web", "198.18.1.1")
    node.add(pod)
    before, node.problem = node.problem, "the relay does not respond."
    node.add(pod)
    assert node.problem in node.message(pod)
    node.problem = before
    node.pods.publish_all()
    node.published.publish()
    assert node.problem in node.message(pod)


async def test_deleted_pod_has_no_condition(node: Node) -> None:
    pod = strict_pod("web", "198.18.1.1")
    other = strict_pod("other", "198.18.1.2")
    node.add(pod)
    node.add(other)
    node.store.remove_pod(pod.pod.uid)
    node.changed.take()
    node.problem = "the relay does not respond."
    for one in (pod, other):
        node.store.in_force.mark(one.pod.uid)
    node.pods.publish_all()
    node.published.publish()
    assert node.changed.take() == [other.pod.uid]
    assert node.conditions.of(pod.pod.uid) == []
