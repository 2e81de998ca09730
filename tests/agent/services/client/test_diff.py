"""Changes between states: added, changed, removed; nothing is lost when one cannot be applied."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.services.client import diff
from agent.services.client.v1alpha1 import endpoints_pb2 as pb

_STATES = st.lists(st.dictionaries(st.integers(0, 5), st.integers(0, 2)))


def test_change_has_new_values_and_removed_ones() -> None:
    differ = diff.Differ({"a": 1, "b": 2, "c": 3})
    change = differ.compare({"a": 1, "b": 4, "d": 5})
    assert change == diff.Change(added={"d": 5}, changed={"b": 4}, removed={"c": 3})
    assert change
    differ.accept()
    assert not differ.compare({"a": 1, "b": 4, "d": 5})


@pytest.mark.parametrize("part", ["added", "changed", "removed"])
def test_change_of_one_kind_is_a_change(part: str) -> None:
    parts: dict[str, dict[str, int]] = {"added": {}, "changed": {}, "removed": {}}
    assert not diff.Change(**parts)
    assert diff.Change(**{**parts, part: {"a": 1}})


def test_change_that_was_not_accepted_is_in_the_next_one() -> None:
    differ: diff.Differ[str, int] = diff.Differ()
    differ.compare({"a": 1})
    assert differ.compare({"a": 1, "b": 1}).added == {"a": 1, "b": 1}


def test_messages_are_compared_by_content() -> None:
    differ: diff.Differ[str, pb.ServiceEndpoints] = diff.Differ()
    differ.compare({"web": pb.ServiceEndpoints(name="web", cluster_ips=["198.18.0.1"])})
    differ.accept()
    assert not differ.compare({"web": pb.ServiceEndpoints(name="web", cluster_ips=["198.18.0.1"])})
    assert differ.compare({"web": pb.ServiceEndpoints(name="web")}).changed


@given(states=_STATES, accepted=st.lists(st.booleans()))
def test_changes_lead_to_the_last_accepted_state(
    states: list[dict[int, int]], accepted: list[bool]
) -> None:
    differ: diff.Differ[int, int] = diff.Differ()
    installed: dict[int, int] = {}
    for state, is_accepted in zip(states, accepted, strict=False):
        change = differ.compare(state)
        assert not change.added.keys() & installed.keys()
        assert change.changed.keys() | change.removed.keys() <= installed.keys()
        if is_accepted:
            differ.accept()
            installed.update({**change.added, **change.changed})
            for key in change.removed:
                del installed[key]
            assert installed == state
