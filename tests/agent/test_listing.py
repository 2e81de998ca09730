"""Names in a sentence."""

import pytest

from agent.listing import listed


@pytest.mark.parametrize(
    ("names", "expected"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c"], "a, b and 1 more")],
)
def test_names_beyond_the_limit_are_a_number(names: list[str], expected: str) -> None:
    assert listed(names, at_most=2) == expected
