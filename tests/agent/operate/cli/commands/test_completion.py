"""`podgate completion`: scripts that shells can read, and words that they complete."""

import os
import subprocess
import sys

import click.testing
import pytest

from agent.operate.cli.main import main


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    done = subprocess.run(
        [sys.executable, "-m", "agent"],
        env={
            **os.environ,
            "_PODGATE_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("podgate", *words)),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def script(shell: str) -> str:
    result = click.testing.CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_calls_podgate(shell: str) -> None:
    assert "_PODGATE_COMPLETE=" in script(shell)
    assert "podgate" in script(shell)


def test_bash_reads_its_script() -> None:
    check = f"{script('bash')}\ncomplete -p podgate"
    done = subprocess.run(["bash", "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("podgate")


def test_commands_and_formats_are_completed() -> None:
    assert completed("sta") == ["status"]
    assert completed("status", "-o", "") == ["table", "wide", "json", "yaml"]


def test_other_shells_are_wrong_usage() -> None:
    result = click.testing.CliRunner().invoke(main, ["completion", "tcsh"])
    assert result.exit_code == 2
