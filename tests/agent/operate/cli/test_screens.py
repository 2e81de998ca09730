"""Each command's screen with its colours, as it was read and approved; `python -m
tests.agent.operate.cli.screens` writes them again."""

import pytest

from tests.agent.operate.cli.screens import DIRECTORY, marked, plain, screens


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[str]]:
    return screens()


def test_screens_are_as_approved(rendered: dict[str, list[str]]) -> None:
    approved = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.iterdir()}
    found = {name: marked(lines) for name, lines in rendered.items()}
    assert sorted(approved) == sorted(found)
    others = {name: text for name, text in found.items() if text != approved[name]}
    assert others == {name: approved[name] for name in others}, (
        "run 'python -m tests.agent.operate.cli.screens' and read the difference"
    )


def test_no_line_is_wider_than_the_screen(rendered: dict[str, list[str]]) -> None:
    wider = [
        (name, line)
        for name, lines in rendered.items()
        for line in map(plain, lines)
        if len(line) > int(name.split(".")[1])
    ]
    assert wider == []
