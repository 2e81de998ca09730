"""`kubectl podgate uninstall`: the order, and what stops it before a node is stranded."""

import json
import pathlib
from typing import Any

import pytest
import yaml

from agent.operate.kubectl import cleaning, main
from tests.agent.operate.kubectl.standin import KubectlStandin

ROOT = pathlib.Path(__file__).parents[4]
OFF = {"maxMode": "off", "maxModeFrom": "the label", "inForce": []}


def daemonset() -> dict[str, Any]:
    """The one of the manifests."""
    text = (ROOT / "deploy/manifests/daemonset.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def cleaning_pod(node: str, *, is_ready: bool) -> dict[str, Any]:
    status = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {
        "metadata": {"name": f"cleaner-{node}"},
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": [status]},
    }


@pytest.fixture
def nodes(kubectl: KubectlStandin) -> KubectlStandin:
    """Two nodes that are off and clean, and nothing else of podgate."""
    kubectl.respond("get", output={"items": []})
    kubectl.serve_nodes("a", "b")
    kubectl.respond("get", "daemonset", "podgate", output=daemonset())
    kubectl.respond("get", "daemonsets", output={"items": [daemonset()]})
    kubectl.respond("exec", output=OFF)
    for word in ("label", "patch", "delete", "logs"):
        kubectl.respond(word)
    clean = [cleaning_pod(node, is_ready=True) for node in ("a", "b")]
    kubectl.respond("get", "podgate.io/cleanup=uninstall", output={"items": clean})
    return kubectl


def run(kubectl: KubectlStandin, tmp_path: pathlib.Path, *arguments: str) -> int:
    file = f"--policies-file={tmp_path / 'policies.json'}"
    options = ("--kubectl", kubectl.command, "--timeout", "5")
    return main.main([*options, "uninstall", file, "--node-timeout=0", *arguments])


def verbs(kubectl: KubectlStandin) -> list[str]:
    """What was changed, in order."""
    return [
        " ".join(call[:3]) for call, _ in kubectl.calls() if call[0] in ("label", "patch", "delete")
    ]


def test_without_yes_it_prints_its_plan_and_changes_nothing(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(nodes, tmp_path) == 1
    assert "Run it with --yes" in capsys.readouterr().out
    assert not nodes.calls()


def test_order_is_injection_off_nodes_objects_and_last_the_crd(
    nodes: KubectlStandin, tmp_path: pathlib.Path
) -> None:
    def own(kind: str, name: str) -> None:
        labels = {"app.kubernetes.io/name": name}
        items = [{"metadata": {"name": name, "labels": labels}}, {"metadata": {"name": "other"}}]
        nodes.respond("get", kind, output={"items": items})

    own("mutatingwebhookconfigurations", "podgate")
    own("deployments.apps", "podgate-controller")
    own("clusterroles.rbac.authorization.k8s.io", "podgate")
    own("customresourcedefinitions.apiextensions.k8s.io", "podgate")
    nodes.respond("get", "namespaces", output={"items": [{"metadata": {"name": "podgate"}}]})
    policies = [{"metadata": {"name": "dns"}}]
    nodes.respond("get", "hostaccesspolicies.policy.podgate.io", output={"items": policies})
    assert run(nodes, tmp_path, "--yes") == 0
    assert verbs(nodes) == [
        "delete deployments.apps podgate-controller",
        "delete mutatingwebhookconfigurations podgate",
        "label namespace podgate",
        "patch daemonset podgate",
        "delete deployments.apps podgate-controller",
        "delete mutatingwebhookconfigurations podgate",
        "delete clusterroles.rbac.authorization.k8s.io podgate",
        "delete namespace podgate",
        "delete customresourcedefinitions.apiextensions.k8s.io podgate",
    ]
    saved = json.loads((tmp_path / "policies.json").read_text(encoding="utf-8"))
    assert saved["items"] == policies


def test_node_that_does_not_respond_stops_it_before_anything_is_deleted(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = [cleaning_pod("a", is_ready=True)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": clean})
    assert run(nodes, tmp_path, "--yes") == 1
    assert verbs(nodes) == ["label namespace podgate", "patch daemonset podgate"]
    printed = capsys.readouterr().out
    assert "no response" in printed
    assert "1 of 2 nodes are not clean" in printed
    assert "--leave-nodes" in printed

    assert run(nodes, tmp_path, "--yes", "--leave-nodes") == 0
    assert "Left as they are: b." in capsys.readouterr().out


def test_node_whose_cleanup_fails_is_listed_with_the_reason(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = [cleaning_pod("a", is_ready=True), cleaning_pod("b", is_ready=False)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": pods})
    nodes.respond("logs", "cleaner-b", output="podgate: another agent is running\n")
    assert run(nodes, tmp_path, "--yes") == 1
    assert "not clean yet: podgate: another agent is running" in capsys.readouterr().out


def test_workloads_with_gated_templates_stop_it(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"readinessGates": [{"conditionType": "podgate.io/isolation-ready"}]}
    metadata = {"namespace": "shop", "name": "web"}
    web = {"kind": "Deployment", "metadata": metadata, "spec": {"template": {"spec": spec}}}
    nodes.respond("get", "--all-namespaces", output={"items": [web]})
    assert run(nodes, tmp_path, "--yes") == 1
    assert "deployment/shop/web" in capsys.readouterr().out
    assert verbs(nodes) == []
    assert run(nodes, tmp_path, "--yes", "--leave-gated-templates") == 0


def test_policies_that_cannot_be_saved_are_not_deleted(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = {"items": [{"metadata": {"name": "dns"}}]}
    nodes.respond("get", "hostaccesspolicies.policy.podgate.io", output=policies)
    (tmp_path / "policies.json").write_text("of another day", encoding="utf-8")
    assert run(nodes, tmp_path, "--yes") == 1
    assert "name another with --policies-file" in capsys.readouterr().err
    assert not nodes.calls("delete", "customresourcedefinitions.apiextensions.k8s.io")


def test_conditions_that_cannot_be_written_are_named_and_a_failure(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = {"conditionType": "podgate.io/isolation-ready"}
    pod = {
        "metadata": {"namespace": "shop", "name": "web", "uid": "u"},
        "spec": {"readinessGates": [gate]},
        "status": {},
    }
    nodes.respond("get", "namespaces", output={"items": [{"metadata": {"name": "shop"}}]})
    nodes.respond("get", "pods", "--namespace=shop", output={"items": [pod]})
    nodes.respond("patch", "--subresource=status", error="Forbidden\n")
    assert run(nodes, tmp_path, "--yes") == 1
    captured = capsys.readouterr()
    assert "Conditions that could not be written: " in captured.out
    assert "podgate is removed." not in captured.out


def test_node_that_is_not_off_in_time_is_named_and_its_cleanup_follows(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.respond("exec", "agent-b", error="podgate: no agent responds\n")
    assert run(nodes, tmp_path, "--yes") == 0
    err = capsys.readouterr().err
    assert "b: " in err
    assert "; continuing, its cleanup detaches all" in err


@pytest.mark.parametrize("is_left", [False, True])
def test_pods_of_nodes_that_are_left_are_deleted_without_their_kubelets(
    nodes: KubectlStandin, tmp_path: pathlib.Path, *, is_left: bool
) -> None:
    nodes.respond("get", "namespaces", output={"items": [{"metadata": {"name": "podgate"}}]})
    options = ["--leave-nodes"] if is_left else []
    assert run(nodes, tmp_path, "--yes", *options) == 0
    assert bool(nodes.calls("delete", "pods", "--force", "--grace-period=0")) is is_left
    assert nodes.calls("delete", "namespace", "podgate")


def test_kind_that_the_server_does_not_have_needs_no_deletion(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "hostaccesspolicies.policy.podgate.io"
    nodes.respond("get", kind, error="error: the server doesn't have a resource type\n")
    assert run(nodes, tmp_path, "--yes") == 0
    nodes.respond("get", kind, error="Forbidden\n")
    assert run(nodes, tmp_path, "--yes") == 1
    assert capsys.readouterr().err.endswith("kubectl podgate: Forbidden\n")


def test_cleaning_pods_mount_what_they_remove_and_replace_agents_at_once() -> None:
    found = daemonset()
    (container,) = found["spec"]["template"]["spec"]["containers"]
    container["args"] += ["--cni-conf-dir=/etc/other", "--cni-bin-dir", "/opt/other"]
    patch = cleaning.patch_of(
        found, conf_directory="/etc/cni/net.d", bin_directory="/opt/cni/bin", options=[]
    )
    spec = patch["spec"]["template"]["spec"]
    (cleaner,) = spec["containers"]
    assert cleaner["args"][:2] == ["cleanup", "--uninstall"]
    assert {
        "--cni-conf-dir=/etc/other",
        "--cni-bin-dir=/opt/other",
        "--run-directory=/host/run/podgate",
    } < set(cleaner["args"])
    paths = {one["mountPath"] for one in cleaner["volumeMounts"]}
    assert {"/sys/fs/bpf", "/host/run", "/etc/other", "/opt/other", "/tmp"} < paths
    assert "/run/podgate" not in paths
    volumes = {one["name"] for one in spec["volumes"]}
    assert {one["name"] for one in cleaner["volumeMounts"]} <= volumes
    assert cleaner["readinessProbe"] == container["readinessProbe"]
    assert patch["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
