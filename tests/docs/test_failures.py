"""Each state of docs/failures.md names its tests, in docs/internals/tested-failures.md."""

import re

import pytest

from tests.docs.blocks import ROOT

STATES = "## What happens when"
TESTED = "## States of failures.md"
ALONE = "## States that need no operator"
# No program can distinguish it from what the operator wants.
UNTESTED = "`--kubelet` names an existing cgroup that is not the kubelet's"


def rows(name: str, heading: str) -> list[list[str]]:
    """The cells of a chapter's tables, without their headers."""
    _, found, chapter = (ROOT / "docs" / name).read_text("utf-8").partition(f"{heading}\n")
    assert found, f"{name} has no chapter {heading!r}"
    lines = re.split(r"^## ", chapter, flags=re.MULTILINE)[0].splitlines()
    tables = [line for line in lines if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]
    return [row for row in cells if row[0] != "state"]


def test_each_state_has_its_row_of_tests() -> None:
    states = [row[0] for row in rows("failures.md", STATES)]
    assert [row[0] for row in rows("internals/tested-failures.md", TESTED)] == states


@pytest.mark.parametrize("heading", [TESTED, ALONE])
def test_each_row_names_tests_that_exist(heading: str) -> None:
    missing = []
    for state, *_, tests in rows("internals/tested-failures.md", heading):
        paths = re.findall(r"tests/[\w/.]+", tests)
        if (not paths and state != UNTESTED) or not all((ROOT / path).exists() for path in paths):
            missing.append(f"{state}: {tests}")
    assert missing == []
