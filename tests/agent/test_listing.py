"""Names in a sentence."""

import pytest

from agent.listing import full_name, listed


@pytest.mark.parametrize(
    ("names", "expected"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c"], "a, b and 1 more")],
)
def test_names_beyond_the_limit_are_a_number(names: list[str], expected: str) -> None:
    assert listed(names, at_most=2) == expected


def test_five_names_are_enough() -> None:
    assert listed([*"abcde"]) == "a, b, c, d, e"
    assert listed([*"abcdefg"]) == "a, b, c, d, e and 2 more"


def test_name_has_its_namespace_if_there_is_one() -> None:
    assert (full_name("shop", "web"), full_name("", "web")) == ("shop/web", "web")
