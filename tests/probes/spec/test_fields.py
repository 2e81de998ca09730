"""How a value that does not fit is named."""

import pytest

from probes.spec import fields


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "a boolean"),
        (5, "the number 5"),
        (-0.5, "the number -0.5"),
        ("x'y", 'the string "x\'y"'),
        ("a" * 64, f"the string '{'a' * 64}'"),
        ("a" * 65, f"the string '{'a' * 61}...'"),
        ({}, "an object"),
        ([], "a list"),
    ],
)
def test_value_is_named_for_people(value: object, words: str) -> None:
    assert fields._kind(value) == words


def test_number_that_cannot_be_printed_is_one() -> None:
    assert fields._kind(10**5000) == "a number"
    assert fields._kind(-(1 << 255)) == f"the number -{str(1 << 255)[:60]}..."
