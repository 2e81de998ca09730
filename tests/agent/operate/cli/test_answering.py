"""Commands beside an agent that is alive, hangs, is dead, or has another version."""

import json
import pathlib

import pytest
from click.testing import CliRunner, Result

from agent.operate.cli.main import main
from tests.agent.operate.cli import answering
from tests.agent.operate.cli.stub_agent import ANSWERS, StubAgent


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], Result]:
    """Of each command in each situation."""
    return answering.answers()


def test_page_is_current(answers: dict[tuple[str, str], Result]) -> None:
    written = answering.PAGE.read_text(encoding="utf-8")
    assert written == answering.page(answers), "run 'python -m tests.agent.operate.cli.answering'"


def test_error_is_at_most_one_sentence(answers: dict[tuple[str, str], Result]) -> None:
    wrong = {
        place: (result.exception, result.stderr, result.stdout)
        for place, result in answers.items()
        if not isinstance(result.exception, SystemExit | None)
        or result.stderr.count("\n") != int(answering.cell(result) != "0")
        or (result.exit_code and result.stdout)
    }
    assert wrong == {}


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"pods": 3, "sources": [null]}', b"<html>"])
@pytest.mark.parametrize("command", ["status", "drops", "rules", "probes", "suggest"])
def test_answer_of_any_form_is_no_traceback(
    command: str, content: bytes, tmp_path: pathlib.Path
) -> None:
    answers = dict.fromkeys(ANSWERS, content)
    with StubAgent(tmp_path / "run", answers):
        result = CliRunner().invoke(main, [command, "--run-directory", str(tmp_path / "run")])
    assert isinstance(result.exception, SystemExit | None)
    assert result.exit_code == (1 if content == b"<html>" else 0)


def test_agent_that_does_not_serve_a_resource_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with StubAgent(tmp_path / "run", {"/status": ANSWERS["/status"]}):
        where = ("--run-directory", str(tmp_path / "run"))
        status = CliRunner().invoke(main, ["status", *where])
        rules = CliRunner().invoke(main, ["rules", *where])
    assert (status.exit_code, rules.exit_code) == (0, 1)
    assert "the agent has version unknown" in status.stderr
    assert "of another version and does not serve /rules" in rules.stderr


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), ["coredns", "ftp", "db", "web"]),
        (("-n", "shop"), ["db", "web"]),
        (("--pod", "db-0"), ["db"]),
        (("--pod", "shop/db-0"), ["db"]),
        (("--pod", "legacy/db-0"), []),
        (("-n", "shop", "--sort", "dropped"), ["db", "web"]),
        (("--sort", "would drop"), ["coredns", "ftp", "db", "web"]),
        (("--sort", "PROBES"), ["db", "coredns", "web", "ftp"]),
    ],
)
def test_pods_are_chosen_and_sorted(
    arguments: tuple[str, ...], names: list[str], tmp_path: pathlib.Path
) -> None:
    with StubAgent(tmp_path / "run"):
        where = ("--run-directory", str(tmp_path / "run"), "-o", "json")
        result = CliRunner().invoke(main, ["status", *arguments, *where])
    assert [pod["name"].split("-")[0] for pod in json.loads(result.stdout)["pods"]] == names


def test_drops_are_chosen_by_time(tmp_path: pathlib.Path) -> None:
    with StubAgent(tmp_path / "run"):
        where = ("--run-directory", str(tmp_path / "run"))
        since = CliRunner().invoke(main, ["drops", "--since", "2026-01-31T07:00", *where])
        wrong = CliRunner().invoke(main, ["drops", "--since", "yesterday", *where])
    assert "systemd-resolve" in since.stdout
    assert "nmap" not in since.stdout
    assert wrong.exit_code == 2
