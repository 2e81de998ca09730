"""What `kubectl podgate doctor` shows of all nodes' findings, and what of it is red."""

import sys

import pytest

from agent.operate.kubectl import main
from tests.agent.operate.kubectl.standin import KubectlStandin


def finding(severity: str, text: str) -> dict[str, str]:
    return {"check": "agent", "severity": severity, "text": text, "remedy": ""}


def shown(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str], *findings: dict[str, str]
) -> list[str]:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", "agent-a", "doctor", output=list(findings))
    main.main(["--kubectl", kubectl.command, "doctor"])
    return capsys.readouterr().out.splitlines()


def test_worst_finding_is_first_and_red(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    findings = [finding("warning", "Old."), finding("ok", "Good."), finding("problem", "Open.")]
    assert shown(kubectl, capsys, *findings) == [
        "\x1b[31mproblem\x1b[0m agent on a: Open.",
        "\x1b[33mwarning\x1b[0m agent on a: Old.",
    ]


def test_no_problem_is_one_sentence(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(kubectl, capsys, finding("ok", "Good.")) == ["No problem was found."]
    assert shown(kubectl, capsys) == []
