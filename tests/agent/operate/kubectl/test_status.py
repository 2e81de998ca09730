"""`kubectl podgate status`: nodes side by side, and the pods that are not as desired."""

import json

import msgspec
import pytest
import yaml

from agent import VERSION
from agent.admin import finding_kinds as kinds
from agent.operate.kubectl import main
from agent.pods import modes
from agent.pods.pod import Problem
from tests.agent.operate.cli.reports import PINNED
from tests.agent.operate.kubectl.reporting import encoded, pod, report
from tests.agent.operate.kubectl.standin import KubectlStandin


@pytest.fixture
def nodes(kubectl: KubectlStandin) -> KubectlStandin:
    """Two nodes that answer, and one without an agent."""
    kubectl.serve_nodes("a", "b", "c", without_agent=["c"])
    web = pod("web", "strict", "Enforced", message="Gated. Strict unavailable: no relay.")
    host = pod("host", "enforce", "HostNetwork")
    pods = (web, host, pod("db", "enforce", "Enforced"), pod("job", "audit", "Audit"))
    kubectl.respond("exec", "agent-a", output=report(*pods))
    unknown = report(kubelet=None, kubelet_problem="no process listens on port 10250.")
    kubectl.respond("exec", "agent-b", output=unknown)
    return kubectl


def run(kubectl: KubectlStandin, *arguments: str) -> int:
    return main.main(["--kubectl", kubectl.command, "status", *arguments])


def test_each_node_has_a_line_with_modes_in_force_of_those_desired(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes) == 1
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == [
        "broken c: No agent runs on this node.",
        "degraded b: Kubelet not identified: no process listens on port 10250.",
        "",
        "3 nodes: 0 in order, 2 with findings, 1 without an answer. "
        "Pods: 1/1 audit, 2/1 enforce, 0/1 strict.",
        "NODE VERSION READY KUBELET FINDINGS PODS",
        "c - - - 1 no answer",
        f"a {VERSION} yes yes 0 1/1 audit, 2/1 enforce, 0/1 strict",
        f"b {VERSION} yes no 1 none",
        "",
        "POD NODE DESIRED IN FORCE REASON",
        "shop/web a strict enforce Enforced",
    ]
    assert max(len(line) for line in text.splitlines() if "nodes:" not in line) <= 80


def test_wide_has_ceilings_and_the_reason_of_each_pod(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    run(nodes, "-o", "wide")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].endswith(
        "Solve the reason in the sentence; on the node, 'podgate status' works without an agent."
    )
    assert f"a {VERSION} yes yes 0 audit strict /system.slice/kubelet.service" in lines[6]
    assert lines[-1] == "shop/web: Gated. Strict unavailable: no relay."


def test_json_and_yaml_have_the_same_content(
    nodes: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes, "-o", "json") == 1
    found = json.loads(capsys.readouterr().out)
    assert run(nodes, "-o", "yaml") == 1
    assert yaml.safe_load(capsys.readouterr().out) == found
    a, b, c = found["nodes"]
    assert (a["desired"], a["inForce"]) == (
        {"audit": 1, "enforce": 1, "strict": 1},
        {"audit": 1, "enforce": 2},
    )
    assert (b["kubelet"], len(b["findings"])) == ("", 1)
    assert [one["finding"]["kind"] for one in found["findings"]] == ["no-answer", "kubelet-unknown"]
    assert c["problem"] == "no agent runs on this node"
    (web,) = found["podsNotAsDesired"]
    assert (web["node"], web["name"], web["desired"], web["inForce"]) == (
        *("a", "web", "strict"),
        "enforce",
    )


@pytest.fixture
def fleet(kubectl: KubectlStandin) -> KubectlStandin:
    """Nine nodes in order, and n5, whose kubelet is not identified."""
    names = [f"n{number}" for number in range(10)]
    kubectl.serve_nodes(*names)
    kubectl.respond("exec", output=report(pod("web", "enforce", "Enforced")))
    unknown = report(kubelet=None, kubelet_problem="no process listens on port 10250.")
    kubectl.respond("exec", "agent-n5", output=unknown)
    return kubectl


def _table(text: str) -> list[str]:
    """The first words of the lines of nodes."""
    lines = text.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.startswith("NODE"))
    return [line.split()[0] for line in lines[head + 1 :]]


def test_node_with_a_finding_is_the_first_of_many(
    fleet: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fleet) == 0
    text = capsys.readouterr().out
    assert "10 nodes: 9 in order, 1 with findings. Pods: 9/9 enforce." in text.splitlines()
    assert _table(text)[:2] == ["n5", "n0"]
    assert len(_table(text)) == 10


def test_nodes_in_order_can_be_left_out(
    fleet: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    run(fleet, "--problems")
    assert _table(capsys.readouterr().out) == ["n5"]
    fleet.respond("exec", output=report(pod("web", "enforce", "Enforced")))
    run(fleet, "--problems")
    assert capsys.readouterr().out == "10 nodes: 10 in order. Pods: 10/10 enforce.\n"


def test_nodes_are_selected_by_labels(
    fleet: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {"items": [{"metadata": {"name": name}} for name in ("n2", "n5", "windows")]}
    fleet.respond("get", "nodes", "pool=a", output=chosen)
    assert run(fleet, "-l", "pool=a") == 0
    assert _table(capsys.readouterr().out) == ["n5", "n2"]
    fleet.respond("get", "nodes", "pool=b", output={"items": []})
    assert run(fleet, "-l", "pool=b") == 1
    assert "no node with an agent has the labels pool=b" in capsys.readouterr().err


def test_json_has_the_summary(fleet: KubectlStandin, capsys: pytest.CaptureFixture[str]) -> None:
    run(fleet, "-o", "json")
    assert json.loads(capsys.readouterr().out)["summary"] == {
        **{"nodes": 10, "inOrder": 9, "withFindings": 1, "silent": 0},
        "desired": {"enforce": 9},
        "inForce": {"enforce": 9},
    }


def test_typo_of_a_namespace_is_one_line_with_counts_whatever_the_number_of_nodes(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Label podgate.io/mode of namespace shop is 'Enforce', which is no mode."
    typo = Problem(modes.INVALID, text, "namespace shop")
    kubectl.serve_nodes("a", "b", "c")
    for name in ("a", "b"):
        pods = [pod(f"web-{name}{number}", "audit", "Audit") for number in range(12)]
        pods = [msgspec.structs.replace(one, mode_problems=[typo]) for one in pods]
        kubectl.respond("exec", f"agent-{name}", output=report(*pods, label_problems=[typo]))
    # It has the namespace's label, and no pod of it.
    kubectl.respond("exec", "agent-c", output=report(label_problems=[typo]))
    assert run(kubectl) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("open 3 nodes (a, b, c), 24 pods (shop/web-a0, ")
    assert first.endswith(f": {text}")
    assert second == ""


def test_equal_findings_of_pods_are_one_line(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", output=report(pod("web", "enforce", "GateFailed", status="False")))
    run(kubectl)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "open shop/web on a, b: Gated."


def test_all_as_desired_is_success(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", "agent-a", output=report(pod("db", "enforce", "Enforced")))
    assert run(kubectl) == 0
    captured = capsys.readouterr()
    assert "1/1 enforce" in captured.out
    assert "DESIRED" not in captured.out
    assert captured.err == ""


def test_gate_that_is_not_on_yet_is_not_in_force(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    failed = pod("db", "enforce", "GateFailed", status="False")
    kubectl.respond("exec", "agent-a", output=report(failed, pod("new", "audit", "")))
    run(kubectl)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-2:] == [
        "shop/db a enforce none GateFailed",
        "shop/new a audit none Pending",
    ]


def test_no_answer_of_any_node_has_its_own_exit_status(kubectl: KubectlStandin) -> None:
    kubectl.serve_nodes("a", "b", without_agent=["b"])
    kubectl.respond("exec", "agent-a", error="podgate: no agent responds\n")
    assert run(kubectl) == 3


def test_agent_of_another_version_is_one_sentence_and_what_both_know(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-a", output=report())
    kubectl.respond("exec", "agent-b", output={"version": "9.0.0", "pods": [], "later": [1]})
    assert run(kubectl) == 0
    captured = capsys.readouterr()
    (note,) = captured.err.splitlines()
    assert f"This plugin is version {VERSION}, agents on b are 9.0.0" in note
    assert "b     9.0.0" in captured.out


def test_answer_that_is_no_report_is_a_problem_of_its_node(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-a", output="podgate 0.0.1, pid 5\n")
    kubectl.respond("exec", "agent-b", output=report())
    assert run(kubectl) == 1
    assert "a: Its agent's answer is not readable" in capsys.readouterr().out


def test_control_characters_of_a_pod_do_not_reach_the_terminal(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    bad = pod("db", "enforce", "GateFailed", status="False", message="\x1b[2Jgone\n")
    kubectl.respond("exec", "agent-a", output=report(bad))
    run(kubectl, "-o", "wide")
    assert r"shop/db: \x1b[2Jgone\n" in capsys.readouterr().out


@pytest.mark.usefixtures("off_without_waiting")
def test_dead_agent_is_named_with_what_its_gates_do(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-a", output=report())
    kubectl.respond("exec", "agent-b", output=encoded(PINNED))
    assert run(kubectl) == 1
    output = capsys.readouterr().out
    assert "broken b: No agent responds, and 1 gate is in force, heartbeat 40 s old.\n" in output
    assert "degraded b: All gates open in 23 h 59 min unless" in output
    kubectl.respond("label", output="")
    kubectl.respond("exec", "agent-b", "off", error="podgate: it is left\n")
    assert main.main(["--kubectl", kubectl.command, "--timeout", "1", "off", "--node", "b"]) == 1
    assert "b     No agent responds, and 1 gate is in force" in capsys.readouterr().out


NODE_LABEL = "the node's label podgate.io/max-mode"


def test_ceiling_below_a_namespaces_label_is_named_with_the_way_back(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    kubectl.respond("exec", "agent-a", output=report())
    limited = report(max_mode="off", max_mode_from=NODE_LABEL)
    kubectl.respond("exec", "agent-b", output=limited)
    shop = {"metadata": {"name": "shop", "labels": {"podgate.io/mode": "strict"}}}
    typo = {"metadata": {"name": "typo", "labels": {"podgate.io/mode": "Enforce"}}}
    kubectl.respond(
        "get", "namespaces", output={"items": [shop, typo, {"metadata": {"name": "x"}}]}
    )
    assert run(kubectl) == 0
    printed = capsys.readouterr().out
    assert (
        f"open b: podgate is off by {NODE_LABEL}: all pods of this node are open; labelled above "
        "that: shop (strict). 'kubectl podgate on NODE' undoes it.\n"
    ) in printed
    assert f"b     {VERSION}    yes    yes      1         none" in printed
    run(kubectl, "-o", "json")
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["finding"]["kind"], found["nodes"]) == (kinds.OFF.name, ["b"])


def test_ceiling_below_a_namespaces_label_that_is_not_off_is_degraded(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output=report(max_mode="audit", max_mode_from="--max-mode"))
    shop = {"metadata": {"name": "shop", "labels": {"podgate.io/mode": "strict"}}}
    kubectl.respond("get", "namespaces", output={"items": [shop]})
    run(kubectl)
    expected = (
        "degraded a: Modes are limited to audit by --max-mode; labelled above that: "
        "shop (strict).\n"
    )
    assert expected in capsys.readouterr().out


def test_ceiling_is_one_finding_with_the_pods_that_its_agent_names(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    limited = Problem(modes.LIMITED, "Mode strict is limited to audit by --max-mode.", "node")
    web = msgspec.structs.replace(pod("web", "audit", "Audit"), mode_problems=[limited])
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output=report(web, max_mode="audit", max_mode_from="--max-mode"))
    shop = {"metadata": {"name": "shop", "labels": {"podgate.io/mode": "strict"}}}
    kubectl.respond("get", "namespaces", output={"items": [shop]})
    run(kubectl, "-o", "json")
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["finding"]["kind"], found["pods"]) == (kinds.MODE_LIMITED.name, ["shop/web"])
    # Users who may not list namespaces have the agent's own.
    kubectl.respond("get", "namespaces", error="Error from server (Forbidden): no\n")
    run(kubectl, "-o", "json")
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["finding"]["sentence"] == limited.message


def test_ceiling_of_the_whole_cluster_is_one_line(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a", "b")
    origin = "the label podgate.io/max-mode of podgate's namespace"
    kubectl.respond("exec", output=report(max_mode="off", max_mode_from=origin))
    run(kubectl)
    expected = (
        f"open 2 nodes (a, b): podgate is off by {origin}: all pods of this node are open. "
        "'kubectl podgate on' undoes it.\n"
    )
    assert expected in capsys.readouterr().out


def test_ceiling_that_limits_no_label_is_not_named(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.serve_nodes("a")
    kubectl.respond("exec", output=report(max_mode="audit", max_mode_from="--max-mode"))
    kubectl.respond("get", "namespaces", error="Error from server (Forbidden): no\n")
    run(kubectl)
    assert "limited" not in capsys.readouterr().out
