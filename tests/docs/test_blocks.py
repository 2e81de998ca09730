"""Every command that README and docs show exists; every one of README and guides runs in a test."""

import itertools
import pathlib
import re

import pytest

from tests.docs import blocks, commands
from tests.docs.blocks import PAGES, ROOT, WALKS, Block

_INLINE = re.compile(r"`((?:kubectl )?podgate [^`\n]+)`")
# The text names commands and options without their values.
_INCOMPLETE = re.compile(r"requires an argument|arguments are required|'' is not one of")


def test_each_block_has_a_language() -> None:
    found = itertools.chain.from_iterable(map(blocks.read, PAGES))
    assert [block.place for block in found if not block.language] == []


def test_commands_and_options_of_pages_exist() -> None:
    found = [
        f"{block.place}: {problem}"
        for page in PAGES
        for block in blocks.read(page)
        if block.is_commands
        for command in block.commands()
        for problem in commands.problems(command.text)
    ]
    assert found == []


def test_commands_in_the_text_of_pages_exist() -> None:
    pages: dict[str, str] = {}
    for page in PAGES:
        for code in _INLINE.findall(page.read_text("utf-8")):
            if "..." not in code and "|" not in code:
                pages.setdefault(code, str(page.relative_to(ROOT)))
    problems = [
        f"{page}: {problem}"
        for code, page in sorted(pages.items())
        for problem in commands.problems(code)
        if not _INCOMPLETE.search(problem)
    ]
    assert problems == []


def test_each_block_of_a_walk_runs_in_a_test_or_has_a_reason() -> None:
    found = itertools.chain.from_iterable(map(blocks.read, WALKS))
    assert [block.place for block in found if block.is_commands and not has_place(block)] == []


def has_place(block: Block) -> bool:
    kind, _, detail = block.marker.partition(":")
    match kind:
        case "sandbox" | "cluster" | "cluster by helm" | "cluster by kubectl":
            return not detail
        case "test":
            return (ROOT / detail.strip()).is_file()
        case "untested":
            return len(detail.split()) >= 3
    return False


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ("sandbox", True),
        ("cluster", True),
        ("test: tests/kernel/test_demo.py", True),
        ("test: tests/kernel/test_missing.py", False),
        ("untested: needs a registry of yours", True),
        ("untested:", False),
        ("", False),
        ("sandbx", False),
    ],
)
def test_markers(marker: str, expected: bool) -> None:
    assert has_place(Block(ROOT / "README.md", 1, "sh", marker, "true\n")) is expected


@pytest.mark.parametrize(
    "text",
    [
        "podgate status --outptu json",
        "podgate sttaus",
        "podgate run --mode enfroce",
        "podgate cni instal",
        "sudo podgate status --wat",
        "kubectl podgate enforce shop --wacth 5s",
        "kubectl -n podgate exec ds/podgate -- podgate sttaus",
        "true && podgate sttaus | head",
        "make dmeo",
        "for x in 1; do",
        "cat > x <<E\npodgate is text here\nE\npodgate sttaus",
    ],
)
def test_misspelt_command_is_found(text: str) -> None:
    assert len(commands.problems(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "podgate status --output json 2>/dev/null >x.json &",
        "podgate run --manifests pods --mode enforce  # a comment about --nothing",
        "podgate run --mode MODE",
        "until podgate status >/dev/null; do sleep 1; done",
        'make demo ARGS="--output json"',
        "kubectl podgate enforce shop --watch 5s",
        "kubectl get pods --nonsense",
        "cat > x <<E\npodgate sttaus\nE",
        "podgate run \\\n  --manifests pods",
    ],
)
def test_good_command_passes(text: str) -> None:
    assert commands.problems(text) == []


def test_console_block_has_commands_with_their_output() -> None:
    text = "$ one |\n    two\n$ three\nits\noutput\n$ four\n"
    block = Block(ROOT / "README.md", 1, "console", "sandbox", text)
    assert block.commands() == [
        blocks.Command("one |\n    two"),
        blocks.Command("three", "its\noutput"),
        blocks.Command("four"),
    ]


def test_block_of_a_list_is_read_without_its_indentation(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "1. text\n\n   ```sh cluster\n   one \\\n     two\n   ```\n\n```yaml\na: 1\n```\n"
    )
    indented, other = blocks.read(page)
    assert (indented.line, indented.language, indented.marker) == (3, "sh", "cluster")
    assert (indented.text, other.text) == ("one \\\n  two\n", "a: 1\n")


def test_yaml_that_begins_with_a_file_name_is_a_file(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```yaml\n# pod.yaml\na: 1\n```\n\n```yaml\nb: 2\n```\n")
    assert blocks.files(page) == {"pod.yaml": "# pod.yaml\na: 1\n"}


def test_console_block_that_starts_with_output_is_an_error() -> None:
    block = Block(ROOT / "README.md", 7, "console", "sandbox", "output\n")
    with pytest.raises(blocks.BlockError, match=r"README\.md:7"):
        block.commands()


@pytest.mark.parametrize(
    ("expected", "output", "result"),
    [
        ("a  b\nc", "a b\nc", True),
        ("a ... c", "a b\nb c", True),
        ("a ...", "b", False),
        ("a", "a b", False),
        ("(1.5)", "(1x5)", False),
        ("...\nlast", "first\nlast\n", True),
    ],
)
def test_output_matches_with_ellipses(expected: str, output: str, result: bool) -> None:
    assert blocks.matches(expected, output) is result
