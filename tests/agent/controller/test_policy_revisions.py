"""What a revision proves: which policies a node has that reports it."""

from agent.controller.policy_revisions import _MAX_REVISIONS, PolicyRevisions
from agent.kube import node_report
from agent.kube.objects import ObjectMetadata


def policy(name: str, generation: int = 1, *, uid: str = "") -> ObjectMetadata:
    return ObjectMetadata(name=name, uid=uid or f"uid-{name}", generation=generation)


def _revisions(*sets: list[ObjectMetadata]) -> PolicyRevisions:
    made = PolicyRevisions()
    for one in sets:
        made.update(one)
    return made


def test_old_revision_proves_unchanged_policies() -> None:
    before = [policy("a"), policy("b")]
    made = _revisions(before, [policy("a"), policy("b", 2)])
    old = node_report.revision(before)
    assert made.has(old, "a")
    assert not made.has(old, "b")
    assert made.has(made.current, "a")
    assert made.has(made.current, "b")


def test_revision_that_was_never_seen_proves_nothing() -> None:
    made = _revisions([policy("a")])
    assert not made.has(node_report.revision([policy("a"), policy("ghost")]), "a")
    assert not made.has("", "a")


def test_policy_that_was_created_again_is_another_one() -> None:
    before = [policy("a")]
    made = _revisions(before, [], [policy("a", uid="uid-2")])
    assert not made.has(node_report.revision(before), "a")
    assert not made.has(node_report.revision([]), "a")


def test_set_that_comes_back_is_the_newest() -> None:
    made = _revisions([policy("a")], [policy("a"), policy("b")], [policy("a")])
    assert made.has(node_report.revision([policy("a")]), "a")
    assert not made.has(made.current, "b")


def test_change_that_is_none_makes_no_revision() -> None:
    """A status is written, or the watch lists again."""
    made = _revisions([policy("a")], [policy("a")])
    assert made.current == node_report.revision([policy("a")])
    for _ in range(10):
        made.update([policy("a")])
    assert made._number == 1


def test_order_of_a_list_does_not_matter() -> None:
    policies = [policy("a"), policy("b"), policy("c")]
    assert node_report.revision(policies) == node_report.revision(reversed(policies))


def test_old_revisions_are_forgotten() -> None:
    made = PolicyRevisions()
    first = node_report.revision([policy("a"), policy("b", 1)])
    for generation in range(1, _MAX_REVISIONS + 2):
        made.update([policy("a"), policy("b", generation)])
    assert not made.has(first, "a")
    assert len(made._numbers) == _MAX_REVISIONS
    assert made.has(made.current, "a")
