"""What `kubectl podgate doctor` shows of all nodes' findings, and what of it is red."""

import json
import sys
from typing import Any

import pytest

from agent.operate.kubectl import findings, main
from agent.operate.kubectl.cluster import last_line
from tests.agent.operate.kubectl.standin import KubectlStandin

ENDED = "command terminated with exit code 1\n"


def finding(severity: str, text: str, **more: Any) -> dict[str, Any]:
    return {"kind": "off", "severity": severity, "subject": "node", "sentence": text, **more}


def doctor(*findings: dict[str, Any], passed: tuple[str, ...] = ()) -> dict[str, Any]:
    """As `podgate doctor --output=json` prints it."""
    in_order = [{"check": name, "text": "Good."} for name in passed]
    return {"findings": list(findings), "passed": in_order}


def shown(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str], report: dict[str, Any]
) -> list[str]:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", "agent-a", "doctor", output=report)
    main.main(["--kubectl", kubectl.command, "doctor"])
    return capsys.readouterr().out.splitlines()


def test_worst_finding_is_first_and_red(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    findings = [
        finding("degraded", "Old.", remedy="Renew it.", nextCommand="podgate rules"),
        finding("note", "New."),
        finding("open", "Open."),
        finding("broken", "Broken."),
    ]
    assert shown(kubectl, capsys, doctor(*findings, passed=("cni",))) == [
        "\x1b[31mopen\x1b[0m a: Open.",
        "\x1b[31mbroken\x1b[0m a: Broken.",
        "\x1b[33mdegraded\x1b[0m a: Old. Renew it. Next: podgate rules",
        "note a: New.",
    ]


def test_no_finding_is_one_sentence(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(kubectl, capsys, doctor(passed=("cni",))) == ["Nothing is wrong."]
    assert shown(kubectl, capsys, doctor()) == []


def test_finding_of_several_nodes_is_one_line(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    old, open_one = finding("degraded", "Old."), finding("open", "Open.")
    kubectl.respond("exec", "agent-a", "doctor", output=doctor(old, passed=("cni",)))
    kubectl.respond("exec", "agent-b", "doctor", output=doctor(old, open_one), error=ENDED)
    assert main.main(["--kubectl", kubectl.command, "doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "open b: Open.",
        "degraded 2 nodes (a, b): Old.",
    ]
    arguments = ["--kubectl", kubectl.command, "doctor", "-o", "wide", "--node", "a"]
    assert main.main(arguments) == 0
    assert "ok cni on a: Good.\n" in capsys.readouterr().out


def test_node_that_cannot_be_checked_is_a_finding(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-a", "doctor", output=doctor(passed=("cni",)))
    kubectl.respond("exec", "agent-b", "doctor", error=f"podgate: no permission\n{ENDED}")
    assert main.main(["--kubectl", kubectl.command, "doctor", "-o", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (only,) = found.pop("findings")
    assert (only["finding"]["kind"], only["nodes"]) == ("no-answer", ["b"])
    assert found == {"passed": {"cni": ["a"]}, "problems": {"b": "podgate: no permission"}}


@pytest.mark.parametrize(
    ("severity", "status"), [("open", 1), ("broken", 1), ("degraded", 0), ("note", 0)]
)
def test_status_is_1_if_a_finding_is_open_or_broken(
    kubectl: KubectlStandin, severity: str, status: int
) -> None:
    kubectl.serve_nodes("a")
    found = doctor(finding("note", "New."), finding(severity, "So."))
    kubectl.respond("exec", "doctor", output=found)
    assert main.main(["--kubectl", kubectl.command, "doctor"]) == status


@pytest.mark.parametrize("answer", ["no JSON", [], {"findings": {}}])
def test_answer_that_is_not_readable_is_a_finding_of_its_node(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str], answer: object
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-a", "doctor", output=answer)
    kubectl.respond("exec", "agent-b", "doctor", output={"later": 1})
    assert main.main(["--kubectl", kubectl.command, "doctor"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("broken a: Its answer is not readable. ")


def test_finding_of_an_unknown_severity_is_degraded(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    later = doctor(finding("fatal", "Something new."))
    assert shown(kubectl, capsys, later) == ["degraded a: Something new."]


def test_last_line_of_an_error_is_its_reason() -> None:
    assert last_line("no such pod\ncommand terminated with exit code 1\n") == "no such pod"
    only = "command terminated with exit code 1"
    assert last_line(f"{only}\n") == only
    assert last_line("\n") == ""


@pytest.mark.parametrize(
    ("count", "line"), [(5, ""), (7, "2 more of kind off: '-o wide' has all.")]
)
def test_many_findings_of_a_kind_are_cut_without_advice(
    capsys: pytest.CaptureFixture[str], count: int, line: str
) -> None:
    found = [
        findings.Merged(findings.Finding("a", "note", "off", "node", f"It {number}."), ("a",), ())
        for number in range(count)
    ]
    findings.show(found, with_advice=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[5:] == ([line] if line else [])
    findings.show(found, with_advice=True)
    assert len(capsys.readouterr().out.splitlines()) == count
