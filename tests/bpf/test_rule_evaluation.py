"""Rules are evaluated as by the gate."""

from bpf.rule_evaluation import Cgroup


def test_cgroup_has_no_ancestor_below_itself() -> None:
    found = Cgroup(7, "/a/b", (1, 5, 7))
    assert [found.ancestor(level) for level in range(5)] == [1, 5, 7, 0, 0]
