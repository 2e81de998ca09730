"""Policies of several sources: which of two is in force, and what is reported of the others."""

import datetime
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from agent.logs import Event
from agent.policy import api_types, effective
from agent.policy.api_types import Policy
from agent.policy.effective import EffectivePolicies, PolicyBatch


def policy(name: str, source: str = "a file", **fields: str) -> Policy:
    document = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": name},
        "spec": {"pods": {"podSelector": {}}, "from": [{"cgroup": {"path": "/x"}}], **fields},
    }
    return api_types.read(document, source=source)


def test_policy_of_the_first_source_is_in_force() -> None:
    first, second, other = policy("a", "one"), policy("a", "two"), policy("b", "two")
    joined = effective.join(
        [PolicyBatch("one", (first,), ("One is wrong.",)), PolicyBatch("two", (second, other))],
        name="both",
    )
    assert joined.name == "both"
    assert joined.policies == (first, other)
    assert joined.problems == (
        "One is wrong.",
        "two has policy a, which one already has; remove one of the two.",
    )


def test_policies_beyond_the_maximum_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_types, "MAX_POLICIES", 2)
    two = [policy(name) for name in "ab"]
    assert effective.join([PolicyBatch("one", tuple(two))], name="it").problems == ()
    more = [policy(name) for name in "cd"]
    joined = effective.join([PolicyBatch("one", (*two, *more))], name="it")
    assert joined.policies == tuple(two)
    assert joined.problems == (
        "it has 2 policies more than the maximum of 2; the last ones are ignored.",
    )


def test_source_with_many_duplicates_has_one_sentence_for_the_rest() -> None:
    policies = [policy(f"p{number}") for number in range(22)]
    batches = [PolicyBatch("one", tuple(policies)), PolicyBatch("two", tuple(policies[:20]))]
    assert len(effective.join(batches, name="both").problems) == 20
    batches[1] = PolicyBatch("two", tuple(policies))
    problems = effective.join(batches, name="both").problems
    assert len(problems) == 21
    assert problems[-1] == "two has 2 more problems."


def test_problem_of_any_length_is_a_sentence() -> None:
    assert effective.sentence("x", uses_last_good=False) == "x."
    kept = effective.sentence("x" * 900, uses_last_good=True)
    assert kept == f"{'x' * 500}. The last valid version stays in force."


class Source:
    """A source whose batch the test replaces."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batch: PolicyBatch[Policy] = PolicyBatch(name)
        self.problem = ""
        self.is_restored = self.has_changed = False

    def restore(self) -> None:
        self.is_restored = True

    def refresh(self) -> bool:
        changed, self.has_changed = self.has_changed, False
        return changed

    async def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        yield None

    def set(self, *policies: Policy, problems: tuple[str, ...] = ()) -> None:
        self.batch = PolicyBatch(self.name, policies, problems)
        self.has_changed = True


def test_policies_are_joined_again_only_after_a_change() -> None:
    one, two = Source("one"), Source("two")
    policies = EffectivePolicies([one, two])
    policies.restore()
    assert one.is_restored
    assert two.is_restored
    assert policies.names == ["one", "two"]
    # The first time also without a change: what was restored counts.
    assert policies.refresh()
    assert not policies.refresh()
    two.set(policy("a"))
    assert policies.refresh()
    assert [found.name for found in policies.policies] == ["a"]
    assert not policies.refresh()


def test_policy_is_in_force_until_it_expires() -> None:
    now = START = 1_796_000_000.0
    source = Source("one")
    policies = EffectivePolicies([source], clock=lambda: now)

    def in_force() -> list[str]:
        return [found.name for found in policies.policies]

    def after(seconds: int) -> str:
        moment = datetime.datetime.fromtimestamp(START + seconds, datetime.UTC)
        return api_types.time_text(moment)

    source.set(policy("a", expires=after(60)), policy("b"), policy("c", expires=after(30)))
    with structlog.testing.capture_logs() as lines:
        policies.refresh()
        assert in_force() == ["a", "b", "c"]
        now = START + 29.9
        assert not policies.refresh()
        now = START + 30
        assert policies.refresh()
        assert in_force() == ["a", "b"]
        assert not policies.refresh()
        now = START + 60
        assert policies.refresh()
        assert in_force() == ["b"]
        now = START + 9999
        assert not policies.refresh()
    logged = [(line["policy"], line["expires"]) for line in lines]
    assert logged == [("c", after(30)), ("a", after(60))]
    assert [found.name for found in policies.expired] == ["a", "c"]
    assert policies.problems == []
    source.set(policy("a", expires=after(20_000)))
    policies.refresh()
    assert (in_force(), policies.expired) == (["a"], ())


def test_policy_with_action_audit_is_staged_and_not_in_force() -> None:
    source = Source("one")
    source.set(policy("a", action="Audit"), policy("b", action="Allow"), policy("c"))
    policies = EffectivePolicies([source])
    policies.refresh()
    assert [found.name for found in policies.policies] == ["b", "c"]
    assert [found.name for found in policies.staged] == ["a"]
    source.set(policy("a", action="Audit", expires="2026-01-01T00:00:00Z"))
    policies = EffectivePolicies([source], clock=lambda: 1_796_000_000.0)
    policies.refresh()
    assert policies.staged == ()
    assert [found.name for found in policies.expired] == ["a"]


def test_policy_that_has_expired_is_never_in_force() -> None:
    source = Source("one")
    source.set(policy("a", expires="2026-01-01T00:00:00Z"))
    policies = EffectivePolicies([source], clock=lambda: 1_796_000_000.0)
    policies.refresh()
    assert policies.policies == ()


def test_each_problem_is_logged_once_while_it_lasts() -> None:
    one = Source("one")
    policies = EffectivePolicies([one, Source("two")])
    with structlog.testing.capture_logs() as lines:
        one.set(problems=("A is wrong.",))
        policies.refresh()
        one.set(problems=("A is wrong.", "B is wrong."))
        policies.refresh()
        one.set(problems=())
        policies.refresh()
        one.set(problems=("A is wrong.",))
        policies.refresh()
    assert [(line["event"], line["problem"]) for line in lines] == [
        (Event.POLICY_PROBLEM, f"{name} is wrong.") for name in "ABA"
    ]
    assert policies.problems == ["A is wrong."]


def test_source_that_cannot_be_followed_is_a_problem_beside_those_of_policies() -> None:
    one, two = Source("one"), Source("two")
    policies = EffectivePolicies([one, two])
    two.problem = "Two is away."
    assert policies.problems == ["Two is away."]
    one.set(problems=("A is wrong.",))
    policies.refresh()
    assert policies.problems == ["A is wrong.", "Two is away."]
