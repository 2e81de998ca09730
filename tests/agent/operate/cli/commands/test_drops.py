"""`podgate drops`: which sources it lists, and what follows a mark."""

import json
import pathlib
from typing import Any

import click.testing
import msgspec
import pytest

from agent.admin.report import Drops
from agent.operate.cli import main
from tests.agent.operate.cli import reports
from tests.agent.operate.cli.stub_agent import ANSWERS, StubAgent

SINCE, SORT, TOP = ["--since", "24h"], ["--sort", "pod"], ["--top", "3"]


def podgate(directory: pathlib.Path, *arguments: str) -> click.testing.Result:
    command = ["drops", "--run-directory", str(directory), *arguments]
    return click.testing.CliRunner().invoke(main.main, command)


def sources(directory: pathlib.Path, *arguments: str, drops: Drops = reports.DROPS) -> list[Any]:
    """What it prints as JSON, where the agent reports these."""
    answers = {**ANSWERS, "/drops": msgspec.json.encode(drops)}
    with StubAgent(directory, answers):
        found = podgate(directory, *arguments, "-o", "json")
    assert found.exit_code == 0, found.output
    listed: list[Any] = json.loads(found.stdout)["sources"]
    return listed


def test_only_the_first_sources_are_listed(tmp_path: pathlib.Path) -> None:
    assert [one["pod"] for one in sources(tmp_path / "a", "--top", "1")] == [
        reports.DROPS.sources[0].pod
    ]
    by_pod = sources(tmp_path / "b", "--top", "2", "--sort", "pod")
    assert [one["namespace"] for one in by_pod] == ["kube-system", "shop"]


def test_table_shows_what_top_leaves_out(tmp_path: pathlib.Path) -> None:
    with StubAgent(tmp_path):
        found = podgate(tmp_path, "--top", "1")
    assert "2 further sources with 247 packets are left out (--top)." in found.stdout
    with StubAgent(tmp_path / "all"):
        assert "left out" not in podgate(tmp_path / "all", "--top", "9").stdout


def test_source_that_a_rule_admits_by_now_is_marked(tmp_path: pathlib.Path) -> None:
    assert [one["isAdmitted"] for one in sources(tmp_path)] == [True, False, False]


def test_mark_is_subtracted(tmp_path: pathlib.Path) -> None:
    drops = reports.DROPS
    busier = msgspec.structs.replace(drops.sources[1], packets=drops.sources[1].packets + 5)
    later = msgspec.structs.replace(drops, sources=[drops.sources[0], busier])
    answers = dict(ANSWERS)
    with StubAgent(tmp_path, answers):
        marked = podgate(tmp_path, "--mark")
        assert "'podgate drops --since mark' shows what follows" in marked.stdout
        nothing = podgate(tmp_path, "--since", "mark")
        assert "No host process has opened a flow" in nothing.stdout
        assert "further sources are not listed" not in nothing.stdout
        answers["/drops"] = msgspec.json.encode(later)
        found = json.loads(podgate(tmp_path, "--since", "mark", "-o", "json").stdout)
    assert [(one["pod"], one["packets"]) for one in found["sources"]] == [(busier.pod, 5)]


def test_without_a_mark_there_is_nothing_to_subtract(tmp_path: pathlib.Path) -> None:
    with StubAgent(tmp_path):
        found = podgate(tmp_path, "--since", "mark")
    assert found.exit_code == 1
    assert "there is no mark on this node; 'podgate drops --mark' sets one" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *(
            (["--mark", *option], "--mark is of all sources: no filters, --sort or --top")
            for option in (["-n", "shop"], ["--pod", "web"], SINCE, SORT, TOP)
        ),
        *(
            (["--follow", *option], "no --since, --sort, --top or --mark")
            for option in (SINCE, SORT, TOP, ["--mark"])
        ),
        (["--since", "yesterday"], "neither a duration such as 24h"),
    ],
)
def test_options_that_contradict_each_other_are_a_usage_error(
    tmp_path: pathlib.Path, arguments: list[str], sentence: str
) -> None:
    found = podgate(tmp_path, *arguments)
    assert found.exit_code == 2
    assert sentence in found.stderr
