"""How a value that does not fit is named."""

import pytest

from probes.spec import fields
from probes.spec.fields import FieldProblem, Fields


def test_problem_names_the_path_and_the_reason() -> None:
    errors: list[FieldProblem] = []
    root = Fields({"spec": {"items": [7, None], "other": 1}}, "", errors)
    spec = root.child("spec", reason="InvalidPod")
    list(spec.children("items"))
    spec.child("other", reason="InvalidHook")
    root.child("spec").add_problem("name", "is wrong")
    root.child("spec").add_problem(None, "is wrong", reason="Special")
    assert errors == [
        FieldProblem(
            "spec.items[0]", "InvalidPod", "spec.items[0] must be an object, not the number 7."
        ),
        FieldProblem(
            *("spec.items[1]", "InvalidPod"),
            "spec.items[1] must be an object, not the string 'null'.",
        ),
        FieldProblem(
            "spec.other", "InvalidHook", "spec.other must be an object, not the number 1."
        ),
        FieldProblem("spec.name", "InvalidProbe", "spec.name is wrong."),
        FieldProblem("spec", "Special", "spec is wrong."),
    ]


def test_fields_of_what_is_no_object_are_not_reported_again() -> None:
    errors: list[FieldProblem] = []
    wrong = Fields("x", "spec", errors)
    wrong.add_problem("name", "is missing")
    assert [error.path for error in errors] == ["spec"]
    assert (wrong.has("name"), wrong.raw("name"), wrong.text("name", "a")) == (False, None, "a")


@pytest.mark.parametrize(
    ("value", "number", "complaint"),
    [
        (None, 3, ""),
        (1, 1, ""),
        (0, 3, "must be at least 1, not 0"),
        (2**31 - 1, 2**31 - 1, ""),
        (2**31, 3, "must be at most 2147483647"),
        (True, 3, "must be a whole number, not a boolean"),
        (1.5, 3, "must be a whole number, not the number 1.5"),
    ],
)
def test_number_is_one_of_the_api(value: object, number: int, complaint: str) -> None:
    errors: list[FieldProblem] = []
    assert Fields({"n": value}, "", errors).integer("n", default=3, minimum=1) == number
    assert [error.message for error in errors] == ([f"n {complaint}."] if complaint else [])


@pytest.mark.parametrize(
    ("value", "flag", "complaint"),
    [
        (None, False, ""),
        (True, True, ""),
        (False, False, ""),
        (1, False, "must be true or false, not the number 1"),
    ],
)
def test_flag_is_true_or_false(value: object, flag: bool, complaint: str) -> None:
    errors: list[FieldProblem] = []
    assert Fields({"f": value}, "", errors).flag("f") is flag
    assert [error.message for error in errors] == ([f"f {complaint}."] if complaint else [])


@pytest.mark.parametrize(
    ("value", "items", "complaint"),
    [
        (None, (), ""),
        ([1], [1], ""),
        ((1, 2), (1, 2), ""),
        ("text", (), "must be a list, not the string 'text'"),
        ({}, (), "must be a list, not an object"),
        (b"text", (), "must be a list, not binary data"),
    ],
)
def test_list_is_no_text(value: object, items: object, complaint: str) -> None:
    errors: list[FieldProblem] = []
    assert Fields({"l": value}, "", errors).items("l") == items
    assert [error.message for error in errors] == ([f"l {complaint}."] if complaint else [])


@pytest.mark.parametrize(
    ("value", "chosen", "complaint"),
    [
        (None, "A", ""),
        ("", "A", ""),
        ("B", "B", ""),
        ("b", "A", "must be A or B, not 'b'"),
        (5, "A", "must be a string, not the number 5"),
    ],
)
def test_choice_has_an_exact_spelling(value: object, chosen: str, complaint: str) -> None:
    errors: list[FieldProblem] = []
    assert Fields({"c": value}, "", errors).choice("c", ("A", "B")) == chosen
    assert [error.message for error in errors] == ([f"c {complaint}."] if complaint else [])


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
    assert fields._kind(1 << 256) == "a number"
    assert fields._kind((1 << 256) - 1).startswith("the number 1157")
    assert fields._kind(-(1 << 255)) == f"the number -{str(1 << 255)[:60]}..."
