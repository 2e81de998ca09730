"""Each command's screen, as it was read and approved; `python -m tests.agent.cli.screens` writes
them again."""

import io

import pytest
import rich.console

from agent.cli.output import Screen
from tests.agent.cli import reports
from tests.agent.cli.screens import DIRECTORY, VIEWS, screens

NAMES = sorted(screens())


@pytest.mark.parametrize("name", NAMES)
def test_screen_is_as_approved(name: str) -> None:
    expected = (DIRECTORY / name).read_text(encoding="utf-8")
    assert screens()[name] == expected, "run 'python -m tests.agent.cli.screens' and read it"


@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_the_screen(name: str) -> None:
    width = int(name.split(".")[1])
    assert [line for line in screens()[name].splitlines() if len(line) > width] == []


def test_there_is_no_other_screen() -> None:
    assert sorted(path.name for path in DIRECTORY.iterdir()) == NAMES


@pytest.mark.parametrize(
    ("name", "colour", "text"),
    [
        ("status", "33", "audit"),
        ("status", "33", "Off"),
        ("status", "32", "Enforced"),
        ("status", "33", "ProbeFailing"),
        ("status-trouble", "31", "GateBypassed"),
        ("status-trouble", "31", "Kubelet not identified"),
        ("status-of-pins", "31", "no"),
        ("doctor", "31", "✗ kubelet-cgroup"),
    ],
)
def test_colour_is_the_danger(name: str, colour: str, text: str) -> None:
    stream = io.StringIO()
    console = rich.console.Console(
        file=stream, width=140, force_terminal=True, color_system="standard", no_color=False
    )
    VIEWS[name](Screen(console=console, now=reports.NOW))
    assert f"\x1b[{colour}m{text}" in stream.getvalue()
