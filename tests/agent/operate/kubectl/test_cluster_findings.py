"""Findings of no node alone: the roll-out, the controller, and policies without an effect."""

import datetime
import pathlib
from typing import Any

import pytest

from agent.admin import finding_kinds as kinds
from agent.controller import webhook_certificate
from agent.operate.kubectl import cluster_findings, main, webhooks
from agent.operate.kubectl.cluster import Cluster
from agent.operate.kubectl.findings import Finding
from agent.operate.kubectl.leftovers import POLICIES
from tests.agent.operate.kubectl.reporting import report
from tests.agent.operate.kubectl.standin import KubectlStandin, agent_pod

WEBHOOKS = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
ADMISSION_POLICIES = "mutatingadmissionpolicies,mutatingadmissionpolicybindings"
CREATED = datetime.datetime(2026, 11, 22, 10, 0, tzinfo=datetime.UTC)


class Objects:
    """Objects of a cluster in which all is in order, until they are changed."""

    def __init__(self, kubectl: KubectlStandin) -> None:
        self.kubectl = kubectl
        kubectl.serve_nodes("a", "b")
        self.daemonset(2)
        self.deployments(2)
        self.policies()
        self.admission()

    def daemonset(self, updated: int, strategy: str = "RollingUpdate") -> None:
        template: dict[str, Any] = {"metadata": {}, "spec": {"containers": []}}
        body = {
            "spec": {"template": template, "updateStrategy": {"type": strategy}},
            "status": {"desiredNumberScheduled": 2, "updatedNumberScheduled": updated},
        }
        self.kubectl.respond("get", "daemonset", output=body)

    def pods(self, *pods: dict[str, Any]) -> None:
        self.kubectl.respond("get", "pods", "--namespace=podgate", output={"items": pods})

    def deployments(self, *available: int) -> None:
        items = [{"spec": {"replicas": 2}, "status": {"availableReplicas": n}} for n in available]
        self.kubectl.respond("get", "deployments", output={"items": items})

    def policies(self, accepted: str = "Valid", **reasons: str) -> None:
        """By name, the reason of Programmed; empty without a status. accepted: of Accepted."""
        items = []
        for name, reason in reasons.items():
            condition = {"type": "Programmed", "reason": reason, "message": "In words."}
            other = {"type": "Accepted", "reason": accepted, "message": "No namespace."}
            status = {"status": {"conditions": [other, condition]}} if reason else {}
            items.append({"metadata": {"name": name}, **status})
        self.kubectl.respond("get", POLICIES, output={"items": items})

    def admission(self, *names: str, bundle: str = "QQ==") -> None:
        """Webhooks and admission policies, by kind and name. bundle: of the webhooks."""
        of_webhooks: list[dict[str, Any]] = []
        of_policies: list[dict[str, Any]] = []
        for kind, _, name in (one.partition("/") for one in names):
            found = {"kind": kind, "metadata": {"name": name}}
            if "Webhook" in kind:
                of_webhooks.append(found | {"webhooks": [{"clientConfig": {"caBundle": bundle}}]})
            else:
                of_policies.append(found)
        self.job(None, has_rights=False)
        self.kubectl.respond("get", WEBHOOKS, output={"items": of_webhooks})
        self.kubectl.respond("get", ADMISSION_POLICIES, output={"items": of_policies})

    def job(self, end: str | None, *, has_rights: bool) -> None:
        """That of the webhooks' certificate. end: the condition of its end; empty while it runs;
        None without a Job; has_rights: whether its bindings exist."""
        named = {"metadata": {"name": "podgate-webhook-certificate"}}
        conditions = [{"type": end, "status": "True"}] if end else []
        jobs = [] if end is None else [named | {"status": {"conditions": conditions}}]
        self.kubectl.respond("get", "jobs", output={"items": jobs})
        other = {"metadata": {"name": "another"}}
        bindings = [other, named] if has_rights else [other]
        self.kubectl.respond("get", "clusterrolebindings", output={"items": bindings})

    def find(self, seconds: float = 0.0) -> list[Finding]:
        """The findings this long after the agents' pods were created."""
        now = CREATED + datetime.timedelta(seconds=seconds)
        return cluster_findings.find(Cluster([self.kubectl.command]), now=now)


@pytest.fixture
def objects(tmp_path: pathlib.Path) -> Objects:
    return Objects(KubectlStandin(tmp_path))


def only(found: list[Finding]) -> tuple[str, str]:
    (one,) = found
    return one.kind, one.sentence


def test_cluster_in_order_has_none(objects: Objects) -> None:
    objects.policies(backup="Programmed", new="Pending")
    objects.admission(
        "MutatingWebhookConfiguration/podgate-webhook-inject",
        "MutatingWebhookConfiguration/another",
        "MutatingAdmissionPolicy/podgate-inject-isolation",
    )
    assert objects.find(seconds=3600) == []


def test_roll_out_without_a_change_for_minutes_is_stuck(objects: Objects) -> None:
    objects.daemonset(1)
    assert objects.find(seconds=180) == []
    assert only(objects.find(seconds=181)) == (
        kinds.ROLL_OUT_STUCK.name,
        "The roll-out of the agents does not continue, 1 of 2 nodes have it.",
    )
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-22T10:05:00Z"}
    newer = agent_pod("b")
    newer["status"]["conditions"] = [ready]
    objects.pods(agent_pod("a"), newer)
    assert objects.find(seconds=400) == []
    assert objects.find(seconds=500) != []


def test_roll_out_that_an_operator_does_pod_by_pod_is_not_stuck(objects: Objects) -> None:
    objects.daemonset(1, strategy="OnDelete")
    assert objects.find(seconds=3600) == []


def test_image_that_is_nowhere_is_named_at_once(objects: Objects) -> None:
    objects.daemonset(0)
    stuck = agent_pod("b")
    waiting = {"waiting": {"reason": "ErrImagePull"}}
    stuck["status"]["containerStatuses"] = [{"name": "agent", "state": waiting}]
    other = {**stuck, "metadata": {**stuck["metadata"], "name": "other"}}
    objects.pods(agent_pod("a"), stuck, other)
    assert only(objects.find()) == (
        kinds.ROLL_OUT_STUCK.name,
        "The roll-out of the agents does not continue, 0 of 2 nodes have it: agent-b on b: "
        "ErrImagePull.",
    )


@pytest.mark.parametrize(
    ("reason", "is_stuck"),
    [
        ("CrashLoopBackOff", True),
        ("InvalidImageName", True),
        ("CreateContainerConfigError", True),
        ("ContainerCreating", False),
        ("", False),
    ],
)
def test_container_that_starts_is_not_stuck(
    objects: Objects, reason: str, *, is_stuck: bool
) -> None:
    objects.daemonset(1)
    pod = agent_pod("b")
    pod["status"]["containerStatuses"] = [
        {"name": "agent", "state": {"waiting": {"reason": reason}}}
    ]
    objects.pods(pod)
    assert bool(objects.find()) is is_stuck


def test_controller_without_an_available_replica_is_missing(objects: Objects) -> None:
    objects.deployments(0)
    assert only(objects.find()) == (
        kinds.CONTROLLER_MISSING.name,
        "No controller runs (2 replicas are desired): policies get no status.",
    )


def test_controller_that_is_not_installed_is_missing_where_policies_wait(
    objects: Objects,
) -> None:
    objects.deployments()
    assert objects.find() == []
    objects.policies(backup="")
    assert only(objects.find())[0] == kinds.CONTROLLER_MISSING.name


@pytest.mark.parametrize("reason", ["NoPodSelected", "NoSourceFound", "NoNodeSelected"])
def test_policy_without_an_effect_has_the_sentence_of_its_status(
    objects: Objects, reason: str
) -> None:
    objects.policies(other="Failed", backup=reason)
    (one,) = objects.find()
    assert (one.kind, one.subject) == (kinds.POLICY_WITHOUT_EFFECT.name, "policy backup")
    assert one.sentence == "Policy backup: In words."


@pytest.mark.parametrize("reason", ["NoPodSelected", "Programmed"])
def test_policy_that_names_no_namespace_is_one_finding_whatever_its_effect(
    objects: Objects, reason: str
) -> None:
    objects.policies("NamespaceMissing", backup=reason)
    (one,) = objects.find()
    assert (one.kind, one.subject) == (kinds.POLICY_NAMESPACE_MISSING.name, "policy backup")
    assert one.sentence == "Policy backup: No namespace."
    assert one.next_command == "kubectl get hostaccesspolicy backup -o yaml"


@pytest.mark.parametrize(
    "name",
    [
        "MutatingWebhookConfiguration/podgate-inject",
        "ValidatingWebhookConfiguration/podgate-probe-spec",
        "MutatingAdmissionPolicy/podgate-inject-probes-passing",
        "MutatingAdmissionPolicyBinding/podgate-inject-isolation-ready",
    ],
)
def test_webhook_of_a_previous_release_is_found(objects: Objects, name: str) -> None:
    objects.admission(name)
    (one,) = objects.find()
    assert (one.kind, one.severity) == (kinds.WEBHOOK_OBSOLETE.name, "degraded")
    kind, _, own = name.partition("/")
    assert one.sentence.startswith(f"{kind.lower()}/{own} is of a previous release")
    assert one.next_command == f"kubectl delete {kind.lower()}/{own}"


def test_webhooks_of_previous_releases_are_those_of_the_job() -> None:
    def singular(path: str) -> str:
        resource, _, name = path.partition("/")
        kind = resource.removesuffix("s").removesuffix("ie")
        return f"{kind}y/{name}" if resource.endswith("ies") else f"{kind}/{name}"

    assert tuple(map(singular, webhook_certificate.OBSOLETE)) == webhooks.OBSOLETE
    assert set(map(singular, webhook_certificate.CONFIGURATIONS)) == set(webhooks.CURRENT)


@pytest.mark.parametrize("bundle", ["", "QQ=="])
def test_webhook_without_a_bundle_is_not_trusted(objects: Objects, bundle: str) -> None:
    objects.admission("ValidatingWebhookConfiguration/podgate-webhook-probe-spec", bundle=bundle)
    found = [(one.kind, one.next_command) for one in objects.find()]
    kind = kinds.WEBHOOK_UNTRUSTED
    assert found == ([] if bundle else [(kind.name, kind.command)])


@pytest.mark.parametrize("end", [None, "Complete", "Failed"])
def test_rights_to_webhooks_that_no_job_uses_are_found(objects: Objects, end: str | None) -> None:
    objects.job(end, has_rights=True)
    kind, sentence = only(objects.find())
    assert kind == kinds.WEBHOOK_RIGHTS_LEFT.name
    assert sentence.startswith("ClusterRoleBinding podgate-webhook-certificate grants")


def test_rights_of_a_job_that_runs_are_none_that_are_left(objects: Objects) -> None:
    objects.job("", has_rights=True)
    assert objects.find() == []


def test_api_server_without_mutating_policies_has_webhooks_all_the_same(objects: Objects) -> None:
    objects.admission("MutatingWebhookConfiguration/podgate-inject")
    text = 'error: the server doesn\'t have a resource type "mutatingadmissionpolicies"\n'
    objects.kubectl.respond("get", ADMISSION_POLICIES, error=text)
    assert only(objects.find())[0] == kinds.WEBHOOK_OBSOLETE.name


def test_what_the_user_may_not_read_is_left_out(objects: Objects) -> None:
    objects.daemonset(1)
    objects.kubectl.respond("get", "deployments", error="Error from server (Forbidden): no\n")
    assert only(objects.find(seconds=3600))[0] == kinds.ROLL_OUT_STUCK.name


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_both_views_of_a_cluster_have_them(
    objects: Objects, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects.kubectl.respond("exec", "status", output=report())
    objects.kubectl.respond("exec", "doctor", output={"findings": [], "passed": []})
    objects.deployments(0)
    assert main.main(["--kubectl", objects.kubectl.command, command]) == 0
    start = "degraded cluster: No controller runs (2 replicas are desired)"
    assert capsys.readouterr().out.startswith(start)
    assert main.main(["--kubectl", objects.kubectl.command, command, "--node", "a"]) == 0
    assert "controller" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_node_that_the_daemonset_no_longer_selects_is_not_a_silent_one(
    objects: Objects, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects.kubectl.serve_nodes("a", without_agent=["a"])
    left = {"items": [{"metadata": {"name": "gone"}}]}
    objects.kubectl.respond("get", "nodereports.podgate.io", output=left)
    main.main(["--kubectl", objects.kubectl.command, command, "-o", "json"])
    printed = capsys.readouterr().out
    assert f'"kind": "{kinds.NO_ANSWER.name}"' in printed
    assert f'"kind": "{kinds.NODE_LEFT.name}"' in printed
