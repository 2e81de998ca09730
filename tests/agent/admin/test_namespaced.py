"""Reports for clients of one namespace: its pods, and no name of another's."""

import msgspec

from agent.admin import finding_kinds as kinds
from agent.admin import namespaced
from agent.admin.finding import Finding, found
from agent.admin.report import ConditionOwnerStatus, PolicyStatus, RulesReport
from agent.pods.pod import Problem
from tests.agent.operate.page import reports

FOREIGN = ("bank", "vault", "postgres")


def has_foreign_name(report: msgspec.Struct) -> bool:
    text = msgspec.json.encode(report).decode()
    return any(name in text for name in FOREIGN)


def with_findings(*findings: Finding) -> list[Finding]:
    report = reports.report(reports.pod(), reports.pod("vault", namespace="bank"))
    report = msgspec.structs.replace(report, findings=list(findings))
    return namespaced.status(report, "shop").findings


def test_status_has_the_pods_of_the_namespace() -> None:
    report = reports.report(
        reports.pod(),
        reports.pod("vault", namespace="bank"),
        policy_problems=["Policy bank-scraper is not applied."],
        policies_without_effect=["Policy bank selects no pod."],
        component_problems=["probing of bank/vault failed."],
        server_problems=["port 9650 is taken by postgres (7)."],
        label_problems=[Problem("LabelInvalid", "Namespace bank has the label x.")],
    )
    assert has_foreign_name(report)
    found_ = namespaced.status(report, "shop")
    assert [pod.full_name for pod in found_.pods] == ["shop/web"]
    assert found_.namespace == "shop"
    assert not has_foreign_name(found_)


def test_pods_that_wait_for_an_owner_are_those_of_the_namespace() -> None:
    waiting = ["shop/web", "bank/vault", "shop-2/web"]
    owner = ConditionOwnerStatus(
        domain="gpu.example.com",
        is_present=False,
        stale_after_seconds=30,
        when_stale="Unknown",
        conditions=1,
        stale=1,
        waiting_pods=waiting,
    )
    report = reports.report(reports.pod(), condition_owners=[owner])
    assert namespaced.status(report, "shop").condition_owners == [
        msgspec.structs.replace(owner, waiting_pods=["shop/web"])
    ]


def test_findings_are_of_its_pods_and_of_what_they_depend_on() -> None:
    kept = [
        found(kinds.OFF, "podgate is off"),
        found(kinds.GATE_FAILED, "no gate", "pod shop/web"),
        found(kinds.LABEL_INVALID, "a label", "namespace shop"),
    ]
    left_out = [
        found(kinds.GATE_FAILED, "no gate", "pod bank/vault"),
        found(kinds.LABEL_INVALID, "a label", "namespace bank"),
        found(kinds.POLICY_NOT_APPLIED, "policy bank-scraper"),
        found(kinds.PORT_NOT_OPEN, "taken by postgres"),
    ]
    assert with_findings(*kept, *left_out) == kept


def test_finding_of_several_pods_names_its_own_only() -> None:
    (one,) = with_findings(
        found(kinds.LABEL_INVALID, "a label", pods=["bank/vault", "shop/web"]),
    )
    assert one.pods == ["shop/web"]


def test_namespace_whose_name_starts_alike_is_another() -> None:
    assert with_findings(found(kinds.GATE_FAILED, "no gate", "pod shop-2/web")) == []


def test_drops_are_those_of_its_pods_and_name_the_namespace() -> None:
    report = reports.drops(reports.source(), reports.source(namespace="bank", pod="vault"))
    found_ = namespaced.drops(report, "shop")
    assert [one.namespace for one in found_.sources] == ["shop"]
    assert (found_.namespace, report.namespace) == ("shop", "")


def test_rules_are_of_policies_that_select_its_pods() -> None:
    def policy(name: str, *pods: str) -> PolicyStatus:
        skipped = dict.fromkeys(pods, 1)
        return PolicyStatus(name=name, source="api", pods=list(pods), rules=[], skipped=skipped)

    report = RulesReport(
        sources=["the API server"],
        policies=[policy("both", "shop/web", "bank/vault"), policy("theirs", "bank/vault")],
        problems=["bank/vault: its gate is full."],
    )
    found_ = namespaced.rules(report, "shop")
    assert [(one.name, one.pods) for one in found_.policies] == [("both", ["shop/web"])]
    assert not has_foreign_name(found_)
