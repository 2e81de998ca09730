"""Findings of many nodes: where each is found, equal ones once, the worst first."""

import dataclasses
from typing import Any

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Severity
from agent.operate.kubectl import findings
from agent.operate.kubectl.findings import Finding


def finding(
    node: str = "a",
    subject: str = "node",
    severity: str = "degraded",
    sentence: str = "It is so.",
    pods: tuple[str, ...] = (),
) -> Finding:
    return Finding(node, severity, "off", subject, sentence, pods=pods)


@pytest.mark.parametrize(
    ("found", "places"),
    [
        ([finding()], "a"),
        ([finding(""), finding("")], "cluster"),
        ([finding("a"), finding("b")], "2 nodes (a, b)"),
        ([finding(subject="pod shop/web")], "shop/web on a"),
        (
            [finding("a", "pod shop/web"), finding("b", "pod shop/web")],
            "shop/web on a, b",
        ),
        (
            [finding("a", "pod shop/web"), finding("a", "pod shop/db")],
            "a, 2 pods (shop/web, shop/db)",
        ),
        ([finding(pods=("shop/web",))], "a, 1 pods (shop/web)"),
        (
            [finding("a", pods=("shop/web",)), finding("b", pods=("shop/web", "shop/db"))],
            "2 nodes (a, b), 2 pods (shop/web, shop/db)",
        ),
    ],
)
def test_finding_is_placed_at_its_nodes_and_pods(found: list[Finding], places: str) -> None:
    (merged,) = findings.merge(found)
    assert merged.places == places


def test_worst_is_first_then_what_most_nodes_and_pods_have() -> None:
    merged = findings.merge(
        [
            finding("a", sentence="One node."),
            finding("a", sentence="Two pods.", pods=("shop/web", "shop/db")),
            finding("a", sentence="Two nodes."),
            finding("b", sentence="Two nodes."),
            finding("a", severity="note", sentence="A note."),
            finding("a", severity="open", sentence="Open."),
        ]
    )
    assert [one.finding.sentence for one in merged] == [
        *("Open.", "Two nodes.", "Two pods.", "One node.", "A note."),
    ]


def test_equal_sentences_of_different_subjects_are_apart() -> None:
    merged = findings.merge([finding(subject="node"), finding(subject="policy a")])
    assert len(merged) == 2


def test_finding_has_the_worst_severity_of_its_nodes() -> None:
    (merged,) = findings.merge([finding("a", severity="note"), finding("b", severity="broken")])
    assert merged.finding.severity == "broken"
    assert merged.nodes == ("a", "b")


@pytest.mark.parametrize("report", [None, {}, "text", [], ["text", 7]])
def test_report_of_another_form_has_no_findings(report: Any) -> None:
    assert findings.read("a", report) == []


def test_finding_of_another_version_may_lack_fields() -> None:
    (found,) = findings.read("a", [{"sentence": "New.", "subject": 7, "pods": "shop/web"}])
    assert (found.subject, found.sentence, found.pods) == ("node", "New.", ())
    assert found.severity == Severity.DEGRADED
    (found,) = findings.read("a", [{"subject": "label x", "pods": ["shop/web"], "since": "now"}])
    assert (found.subject, found.pod_names, found.since) == ("label x", ("shop/web",), "now")


def test_findings_of_a_pod_are_those_that_name_it() -> None:
    own, shared = finding(subject="pod shop/web"), finding(pods=("shop/db", "shop/web"))
    found = findings.of_pod([own, shared, finding(), finding(subject="pod shop/db")], "shop/web")
    assert list(found) == [own, shared]


def test_only_notes_are_no_problems() -> None:
    problems = [one for one in Severity if findings.is_problem(finding(severity=one.value))]
    assert problems == [one for one in Severity if one is not Severity.NOTE]


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [("no agent responds", "No agent responds."), ("It hangs.", "It hangs.")],
)
def test_node_that_does_not_answer_has_the_reason(problem: str, sentence: str) -> None:
    selected, left = (findings.no_answer("a", problem, is_selected=by) for by in (True, False))
    assert (selected.sentence, left.sentence) == (sentence, sentence)
    assert selected.kind != left.kind


def test_finding_has_all_that_its_report_has() -> None:
    report = {
        **{"severity": "open", "kind": "off", "subject": "pod shop/web", "sentence": "It is so."},
        **{"remedy": "Mend it.", "nextCommand": "kubectl get pods", "since": "2026-01-01"},
        "pods": ["shop/db", 7],
    }
    assert findings.read("a", ["text", report]) == [
        Finding(
            *("a", "open", "off", "pod shop/web", "It is so.", "Mend it."),
            *("kubectl get pods", "2026-01-01", ("shop/db", "7")),
        )
    ]


def test_finding_of_no_answer_or_of_the_cluster_has_what_its_kind_has() -> None:
    for kind, is_selected in ((kinds.NO_ANSWER, True), (kinds.NODE_LEFT, False)):
        assert findings.no_answer("a", "it hangs", is_selected=is_selected) == Finding(
            *("a", kind.severity, kind.name, "node", "It hangs.", kind.remedy, kind.command)
        )
    kind = kinds.POLICY_NAMESPACE_MISSING
    assert findings.of_cluster(kind, "It is so.", "policy backup") == Finding(
        *("", kind.severity, kind.name, "policy backup", "It is so.", kind.remedy),
        "kubectl get hostaccesspolicy backup -o yaml",
    )
    assert findings.of_cluster(kinds.ROLL_OUT_STUCK, "It is so.").subject == "cluster"


def printed(
    capsys: pytest.CaptureFixture[str], *found: Finding, with_advice: bool = False
) -> list[str]:
    findings.show(findings.merge(found), with_advice=with_advice)
    return capsys.readouterr().out.splitlines()


def test_findings_of_a_kind_are_five_lines_and_a_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [finding(sentence=f"{number}.\x1b") for number in range(7)]
    lines = [f"degraded a: {number}.\\x1b" for number in range(7)]
    more = "2 more of kind off: '-o wide' has all."
    assert printed(capsys, *found) == [*lines[:5], more]
    assert printed(capsys, *found[:5]) == lines[:5]
    assert printed(capsys, *found, with_advice=True) == lines
    other = dataclasses.replace(finding(), kind="other")
    assert printed(capsys, *found, other) == [*lines[:5], "degraded a: It is so.", more]


def test_advice_is_the_remedy_and_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    both = dataclasses.replace(finding(), remedy="Mend it.", next_command="kubectl get pods")
    command = dataclasses.replace(both, sentence="Run.", remedy="")
    assert printed(capsys, both, command) == ["degraded a: It is so.", "degraded a: Run."]
    assert printed(capsys, both, command, with_advice=True) == [
        "degraded a: It is so. Mend it. Next: kubectl get pods",
        "degraded a: Run. Next: kubectl get pods",
    ]
