"""Completion of `kubectl podgate`, as kubectl requests it."""

import pathlib
import subprocess
import sys

import pytest

from agent.operate.kubectl import main
from tests.agent.operate.kubectl.standin import KubectlStandin

ROOT = pathlib.Path(__file__).parents[4]


@pytest.fixture
def named(kubectl: KubectlStandin) -> KubectlStandin:
    kubectl.respond("get", "nodes", output="node/a1\nnode/a2\nnode/b1\n")
    kubectl.respond("get", "namespaces", output="namespace/shop\nnamespace/podgate\n")
    kubectl.respond("get", "pods", output="pod/web-1\npod/db-0\n")
    return kubectl


def completed(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    """Candidates without descriptions. The directive keeps the shell from file names."""
    assert main.complete(words, kubectl.command) == 0
    *lines, directive = capsys.readouterr().out.splitlines()
    assert directive == ":4"
    return [line.partition("\t")[0] for line in lines]


def test_commands_are_completed_with_their_descriptions(
    named: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    main.complete(["st"], named.command)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("\t")[0] for line in lines] == ["status", "strict", ":4"]
    assert lines[0].endswith(
        "\tShow what is wrong, the agent of each node, and pods that are not as desired."
    )
    assert "status" in completed(named, capsys, "")


def test_options_are_those_of_the_command(
    named: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(named, capsys, "status", "--pro") == ["--problems"]
    assert completed(named, capsys, "drops", "--pro") == []
    assert "--timeout" in completed(named, capsys, "--")
    # A hyphen alone may become either; both forms of one option would be twice the list.
    assert {text[:2] for text in completed(named, capsys, "status", "-")} == {"--"}
    assert completed(named, capsys, "status", "-o") == ["-o"]


def test_values_of_an_option_are_its_choices(
    named: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(named, capsys, "status", "-o", "") == ["table", "wide", "json", "yaml"]
    assert completed(named, capsys, "status", "-o", "w") == ["wide"]


def test_names_of_objects_are_read_from_the_cluster(
    named: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(named, capsys, "status", "--node", "a") == ["a1", "a2"]
    assert completed(named, capsys, "--timeout", "5", "exec", "b") == ["b1"]
    assert completed(named, capsys, "off", "a1", "") == ["a1", "a2", "b1"]
    assert completed(named, capsys, "enforce", "sh") == ["shop"]
    assert completed(named, capsys, "drops", "-n", "") == ["shop", "podgate"]
    assert completed(named, capsys, "why-not-ready", "w") == ["web-1"]
    assert completed(named, capsys, "drops", "--pod", "") == ["web-1", "db-0"]
    assert completed(named, capsys, "why-not-ready", "web-1", "") == []
    assert completed(named, capsys, "drops", "--follow", "--node", "b") == ["b1"]
    assert completed(named, capsys, "drops", "--node", "a1", "--sort", "n") == ["node"]
    assert completed(named, capsys, "drops", "--top", "") == []


def test_candidates_have_their_descriptions(
    named: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    main.complete(["status", "--node"], named.command)
    assert capsys.readouterr().out == "--node\tThis node only.\n:4\n"
    main.complete(["exec", "a"], named.command)
    assert capsys.readouterr().out == "a1\na2\n:4\n"
    main.complete([], named.command)
    assert len(capsys.readouterr().out.splitlines()) == len(main._COMMANDS) + 2


def test_a_cluster_that_does_not_respond_has_no_candidates(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(kubectl, capsys, "enforce", "") == []
    assert completed(kubectl, capsys, "no-such-command", "") == []


def test_packed_file_completes_by_the_name_that_kubectl_runs(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "kubectl-podgate"
    subprocess.run([sys.executable, ROOT / "deploy/plugin.py", target], check=True)
    done = subprocess.run(
        [tmp_path / "kubectl_complete-podgate", "why"], check=True, capture_output=True, text=True
    )
    first, last = done.stdout.splitlines()
    assert (first.partition("\t")[0], last) == ("why-not-ready", ":4")
