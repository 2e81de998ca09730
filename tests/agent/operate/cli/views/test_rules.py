"""What `podgate rules` prints where no policy is in force, and what is wrong with the others."""

import msgspec
import pytest

from agent.admin.report import RulesReport
from agent.operate.cli.output import Screen
from agent.operate.cli.views import rules
from tests.agent.operate.cli.reports import RULES


def shown(report: RulesReport, capsys: pytest.CaptureFixture[str]) -> list[str]:
    rules.show(Screen(), report, rules.rows(report.policies))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ([], "The agent runs without --rules: only the kubelet is admitted."),
        (["a.yaml"], "No HostAccessPolicy of a.yaml is in force."),
        (
            ["the API server", "a.yaml"],
            "No HostAccessPolicy of the API server or a.yaml is in force.",
        ),
    ],
)
def test_no_policy_is_one_sentence(
    sources: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RulesReport(sources=sources, policies=[], problems=["a.yaml is broken."])
    assert shown(report, capsys) == [sentence, "a.yaml is broken."]


def test_policy_that_will_expire_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    (policy, *_) = RULES.policies
    policy = msgspec.structs.replace(policy, name="debug", expires="2026-12-01T18:00:00Z")
    report = msgspec.structs.replace(RULES, policies=[policy])
    assert "Policy debug admits its sources until 2026-12-01T18:00:00Z." in shown(report, capsys)


def test_policy_with_action_audit_admits_nothing_and_has_what_it_would_have_admitted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (policy, *_) = RULES.policies
    rule = msgspec.structs.replace(policy.rules[0], hits=7)
    policy = msgspec.structs.replace(policy, name="new", rules=[rule, rule], action="Audit")
    report = msgspec.structs.replace(RULES, policies=[policy])
    lines = shown(report, capsys)
    assert "(7)" in lines[1]
    assert lines[-1] == (
        "Policy new has action Audit: it admits nothing, and would have admitted 14 of the "
        "observed packets."
    )


def test_problem_of_several_rules_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (policy, *_) = RULES.policies
    rule = msgspec.structs.replace(policy.rules[0], problem="No such unit.")
    policy = msgspec.structs.replace(policy, rules=[rule, rule])
    report = msgspec.structs.replace(RULES, policies=[policy])
    assert shown(report, capsys).count("No such unit.") == 1


@pytest.mark.parametrize(
    ("protocol", "ports", "text"),
    [
        ("any", "any", "anything"),
        ("tcp", "any", "tcp"),
        ("tcp", "80,443", "tcp 80,443"),
    ],
)
def test_ports_of_a_rule_in_words(protocol: str, ports: str, text: str) -> None:
    rule = msgspec.structs.replace(RULES.policies[0].rules[0], protocol=protocol, ports=ports)
    assert rules.ports_text(rule) == text
