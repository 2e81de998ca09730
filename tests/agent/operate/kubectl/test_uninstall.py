"""`kubectl podgate uninstall`: the order, and what stops it before a node is stranded."""

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from agent.operate.kubectl import cleaning, main, uninstall
from agent.operate.kubectl.cluster import Cluster
from tests.agent.operate.kubectl.moved_clock import MovedClock
from tests.agent.operate.kubectl.standin import KubectlStandin, agent_pod, node
from tests.chart import examples, rendering

ROOT = pathlib.Path(__file__).parents[4]
START = cleaning.Start("/etc/cni/net.d", "/opt/cni/bin")
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
    kubectl.respond("get", "app.kubernetes.io/name=podgate-cleanup", output={"items": []})
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
    plan = f"""\
This removes podgate from the cluster:
  1. Injection and guards, and the controller.
  2. All gates open (podgate.io/max-mode=off).
  3. On each node: podgate-cni's entry and binary, pins, interfaces, tables, saved state.
     Nodes: a, b.
  4. Conditions of pods with readiness gates of podgate stay True, with reason Removed.
  5. Namespace podgate, rights, and last the CustomResourceDefinition with all
     HostAccessPolicies, which are saved to {tmp_path / "policies.json"} before.
"""
    assert capsys.readouterr().out == f"{plan}Run it with --yes.\n"
    assert verbs(nodes) == []


def test_order_is_injection_off_nodes_objects_and_last_the_crd(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def own(kind: str, name: str) -> None:
        labels = {"app.kubernetes.io/name": name}
        items = [{"metadata": {"name": name, "labels": labels}}, {"metadata": {"name": "other"}}]
        nodes.respond("get", kind, output={"items": items})

    own("mutatingwebhookconfigurations", "podgate")
    own("daemonsets.apps", "podgate-proxy")
    own("deployments.apps", "podgate-controller")
    own("clusterroles.rbac.authorization.k8s.io", "podgate")
    own("customresourcedefinitions.apiextensions.k8s.io", "podgate")
    nodes.respond("get", "namespaces", output={"items": [{"metadata": {"name": "podgate"}}]})
    applied = "kubectl.kubernetes.io/last-applied-configuration"
    of_server = dict.fromkeys(
        ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink"),
        "1",
    )
    metadata = {"name": "dns", "annotations": {applied: "{}", "own": "x"}, "labels": {"a": "b"}}
    policy = {
        **{"kind": "HostAccessPolicy", "metadata": metadata | of_server, "spec": {"ports": []}},
        "status": {"x": 1},
    }
    nodes.respond("get", "hostaccesspolicies.policy.podgate.io", output={"items": [policy]})
    assert run(nodes, tmp_path, "--yes") == 0
    assert verbs(nodes) == [
        "delete deployments.apps podgate-controller",
        "delete mutatingwebhookconfigurations podgate",
        "delete daemonsets.apps podgate-proxy",
        "label namespace podgate",
        "patch daemonset podgate",
        "delete deployments.apps podgate-controller",
        "delete daemonsets.apps podgate-proxy",
        "delete mutatingwebhookconfigurations podgate",
        "delete clusterroles.rbac.authorization.k8s.io podgate",
        "delete namespace podgate",
        "delete customresourcedefinitions.apiextensions.k8s.io podgate",
    ]
    saved = json.loads((tmp_path / "policies.json").read_text(encoding="utf-8"))
    assert saved == {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "kind": "HostAccessPolicy",
                "metadata": {**metadata, "annotations": {"own": "x"}},
                "spec": {"ports": []},
            }
        ],
    }
    printed = capsys.readouterr()
    file = tmp_path / "policies.json"
    assert printed.out.splitlines() == [
        *("NODE  STATE", "a     clean", "b     clean"),
        f"1 HostAccessPolicies saved to {file}.",
        f"After the next installation: kubectl apply -f {file}",
        "podgate is removed.",
    ]
    assert printed.err.splitlines() == [
        "Deleting deployments.apps podgate-controller",
        "Deleting mutatingwebhookconfigurations podgate",
        "Deleting daemonsets.apps podgate-proxy",
        *("Opening all gates ...", "Cleaning the nodes ..."),
        "Deleting deployments.apps podgate-controller",
        "Deleting daemonsets.apps podgate-proxy",
        "Deleting mutatingwebhookconfigurations podgate",
        "Deleting clusterroles.rbac.authorization.k8s.io podgate",
        "Deleting namespace podgate",
        "Deleting customresourcedefinitions.apiextensions.k8s.io podgate",
    ]


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


def test_pods_become_ready_while_nodes_are_cleaned(
    nodes: KubectlStandin, tmp_path: pathlib.Path
) -> None:
    pod = {
        "metadata": {"namespace": "shop", "name": "web", "uid": "u"},
        "spec": {"readinessGates": [{"conditionType": "podgate.io/isolation-ready"}]},
        "status": {},
    }
    nodes.respond("get", "namespaces", output={"items": [{"metadata": {"name": "shop"}}]})
    nodes.respond("get", "pods", "--namespace=shop", output={"items": [pod]})
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": []})
    assert run(nodes, tmp_path, "--yes") == 1
    assert len(nodes.calls("patch", "pod", "web", "--subresource=status")) == 1


def test_node_whose_cleanup_fails_is_listed_with_the_reason(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = [cleaning_pod("a", is_ready=True), cleaning_pod("b", is_ready=False)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": pods})
    nodes.respond("logs", "cleaner-b", output="podgate: another agent is running\n")
    assert run(nodes, tmp_path, "--yes") == 1
    assert "not clean yet: podgate: another agent is running" in capsys.readouterr().out


LOG, PREVIOUS = {"output": "podgate: it is busy\n"}, {"output": "podgate: it has ended\n"}
FAILED = {"error": "Error from server: no log\n"}


@pytest.mark.parametrize(
    ("status", "log", "previous", "state"),
    [
        ({"phase": "Running"}, LOG, PREVIOUS, "not clean yet: podgate: it is busy"),
        ({"phase": "Running"}, {}, PREVIOUS, "not clean yet: podgate: it has ended"),
        ({"phase": "Running"}, {}, FAILED, "not clean yet: Error from server: no log"),
        ({"phase": "Running"}, FAILED, PREVIOUS, "not clean yet: Error from server: no log"),
        ({"phase": "Pending"}, {}, {}, "not clean yet: Pending"),
        ({}, {}, {}, "not clean yet: the pod has not started"),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, LOG, PREVIOUS, "clean"),
    ],
)
def test_node_has_the_last_line_of_its_cleaning_pod(
    kubectl: KubectlStandin,
    status: dict[str, Any],
    log: dict[str, str],
    previous: dict[str, str],
    state: str,
) -> None:
    kubectl.serve_nodes("a")
    pod = {**cleaning_pod("a", is_ready=False), "status": status}
    kubectl.respond("get", "podgate.io/cleanup=uninstall", output={"items": [pod]})
    kubectl.respond("logs", "cleaner-a", "--container=agent", "--tail=1", **log)  # type: ignore[arg-type]
    kubectl.respond("logs", "--previous", **previous)  # type: ignore[arg-type]
    assert [one.state for one in cleaning.verdicts(Cluster([kubectl.command]), ["a"])] == [state]


def test_nodes_have_time_to_become_clean(
    nodes: KubectlStandin,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def become_clean() -> None:
        clean = [cleaning_pod(node, is_ready=True) for node in ("a", "b")]
        nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": clean})

    clock = MovedClock()
    clock.at[3] = become_clean
    monkeypatch.setattr(uninstall, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    left = [cleaning_pod("a", is_ready=True)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": left})
    assert run(nodes, tmp_path, "--yes", "--node-timeout=10") == 0
    assert clock.now == 3
    assert capsys.readouterr().out.splitlines() == [
        *("NODE  STATE", "a     clean", "b     clean", "podgate is removed."),
    ]


def test_workloads_with_gated_templates_stop_it(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"readinessGates": [{"conditionType": "podgate.io/isolation-ready"}]}
    metadata = {"namespace": "shop", "name": "web"}
    web = {"kind": "Deployment", "metadata": metadata, "spec": {"template": {"spec": spec}}}
    nodes.respond("get", "--all-namespaces", output={"items": [web]})
    assert run(nodes, tmp_path, "--yes") == 1
    heading, name, *_ = capsys.readouterr().out.splitlines()
    assert heading == "Workloads with readiness gates of podgate in their pod templates:"
    assert name == "  deployment/shop/web"
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


def test_cleaning_pods_of_the_manifests_mount_what_they_remove() -> None:
    found = daemonset()
    (container,) = found["spec"]["template"]["spec"]["containers"]
    spec = cleaning.patch_of(found, START)["spec"]["template"]["spec"]
    (cleaner,) = spec["containers"]
    paths = {one["mountPath"] for one in cleaner["volumeMounts"]}
    assert {"/sys/fs/bpf", "/host/run", "/etc/cni/net.d", "/opt/cni/bin", "/tmp"} < paths
    assert "/run/podgate" not in paths
    volumes = {one["name"] for one in spec["volumes"]}
    assert {one["name"] for one in cleaner["volumeMounts"]} <= volumes
    assert cleaner["readinessProbe"] == container["readinessProbe"]


def small_daemonset(*arguments: str, **container: Any) -> dict[str, Any]:
    """With what a cleaning pod takes over, changes, and leaves out."""
    agent = {
        "name": "agent",
        "image": "podgate:1",
        "args": [*arguments],
        "volumeMounts": [
            {"name": "run", "mountPath": "/run/podgate"},
            {"name": "x", "mountPath": "/x"},
        ],
        **container,
    }
    spec = {
        "affinity": {},
        "nodeSelector": {"zone": "one"},
        "serviceAccountName": "podgate",
        "serviceAccount": "podgate",
        "hostNetwork": True,
        "containers": [{"name": "other"}, agent],
        "volumes": [{"name": "run"}, {"name": "x"}],
    }
    return {"spec": {"template": {"metadata": {}, "spec": spec}}}


def mount(number: int, path: str) -> dict[str, str]:
    name = f"podgate-{number}"
    return {"name": name, "mountPath": path, "mountPropagation": "HostToContainer"}


def volume(number: int, path: str) -> dict[str, Any]:
    return {"name": f"podgate-{number}", "hostPath": {"path": path}}


@pytest.mark.parametrize(
    ("arguments", "cni", "further"),
    [
        ((), ("/etc/cni/net.d", "/opt/cni/bin"), ("--run-directory=/host/run/podgate",)),
        (
            (
                *("--cni-conf-dir=/etc/other", "--cni-bin-dir", "/opt/other", "--verbose"),
                *("--run-directory=/run/other", "--bpffs=/bpf"),
            ),
            ("/etc/other", "/opt/other"),
            ("--run-directory=/host/run/other", "--bpffs=/bpf"),
        ),
    ],
)
def test_agents_are_replaced_by_cleaning_pods_at_once(
    arguments: tuple[str, ...], cni: tuple[str, str], further: tuple[str, ...]
) -> None:
    found = small_daemonset(*arguments)
    kept = [{"name": "x", "mountPath": "/x"}]
    if "--run-directory=/run/other" in arguments:
        kept = [{"name": "run", "mountPath": "/run/podgate"}, *kept]
    cleaner = {
        "name": "agent",
        "image": "podgate:1",
        "args": [
            *("cleanup", "--uninstall", f"--cni-conf-dir={cni[0]}", f"--cni-bin-dir={cni[1]}"),
            *(*further, "--pod-directory=/tmp", "--keep-cni-binary"),
        ],
        "env": [],
        "volumeMounts": [*kept, mount(0, "/host/run"), mount(1, cni[0]), mount(2, cni[1])],
    }
    volumes = [{"name": "run"}, {"name": "x"}]
    volumes += [volume(0, "/run"), volume(1, cni[0]), volume(2, cni[1])]
    how = cleaning.Start("/etc/cni/net.d", "/opt/cni/bin", ("--keep-cni-binary",))
    assert cleaning.patch_of(found, how) == {
        "spec": {
            "minReadySeconds": 0,
            "updateStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"},
            },
            "template": {
                "metadata": {"labels": {"podgate.io/cleanup": "uninstall"}},
                "spec": {"containers": [cleaner], "volumes": volumes},
            },
        }
    }


@pytest.mark.parametrize("is_replaced", [False, True])
def test_cleaning_pod_of_a_node_is_as_those_of_the_daemonset(*, is_replaced: bool) -> None:
    found = small_daemonset()
    template = cleaning.patch_of(found, START)["spec"]["template"]
    if is_replaced:
        old = found["spec"]["template"]["spec"]
        found["spec"]["template"] = {**template, "spec": {**old, **template["spec"]}}
    assert cleaning.pod_of(found, START, "b") == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "podgate-cleanup-",
            "labels": {
                "podgate.io/cleanup": "uninstall",
                "app.kubernetes.io/name": "podgate-cleanup",
            },
        },
        "spec": {
            "hostNetwork": True,
            **template["spec"],
            "nodeName": "b",
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
        },
    }


def test_cleaning_pods_remove_the_services_that_an_agent_saves_elsewhere() -> None:
    mounts = [{"name": "state", "mountPath": "/var/lib/podgate"}, {"name": "x", "mountPath": "/x"}]
    found = small_daemonset(
        "--services-state=/var/lib/podgate/services.json",
        env=[{"name": "A", "value": "B"}],
        volumeMounts=mounts,
    )
    spec = cleaning.patch_of(found, START)["spec"]["template"]["spec"]
    (cleaner,) = spec["containers"]
    assert cleaner["env"] == [
        {"name": "A", "value": "B"},
        {"name": "PODGATE_SERVICES_STATE", "value": "/host/var/lib/podgate/services.json"},
    ]
    # What an earlier version does not know would end its container.
    assert not [one for one in cleaner["args"] if "services" in one]
    assert cleaner["volumeMounts"][0] == mounts[1]
    assert cleaner["volumeMounts"][-1] == mount(3, "/host/var/lib")
    assert spec["volumes"][-1] == volume(3, "/var/lib")


def serve_labels(kubectl: KubectlStandin, **namespaces: str) -> None:
    """Namespaces with these modes, beside podgate's, and node b with the ceiling off."""
    items = [
        {"metadata": {"name": name, "labels": {"podgate.io/mode": mode}}}
        for name, mode in namespaces.items()
    ]
    own = {"metadata": {"name": "podgate", "labels": {"podgate.io/max-mode": "off"}}}
    kubectl.respond("get", "namespaces", output={"items": [own, *items]})
    labelled = node("b", **{"podgate.io/max-mode": "off"})
    kubectl.respond("get", "nodes", output={"items": [node("a"), labelled]})


def test_labels_that_a_new_installation_would_enforce_need_a_decision(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_labels(nodes, shop="enforce", dev="audit")
    assert run(nodes, tmp_path, "--yes") == 1
    printed = capsys.readouterr().out
    assert "namespace shop: podgate.io/mode=enforce" in printed
    assert "dev" not in printed
    assert "--labels=keep or --labels=remove" in printed
    assert verbs(nodes) == []

    assert run(nodes, tmp_path, "--yes", "--labels=keep") == 0
    printed = capsys.readouterr().out
    assert "kubectl label namespace shop podgate.io/mode-" in printed
    assert "kubectl label namespace shop podgate.io/left-behind-" in printed
    assert "node b: podgate.io/max-mode=off" in printed
    assert not nodes.calls("label", "shop", "podgate.io/mode-")
    # The next installation waits for a confirmation of what enforces, and of nothing else.
    (marked,) = (call for call in verbs(nodes) if call.startswith("label namespace shop"))
    assert marked
    assert nodes.calls("label", "namespace", "shop", "podgate.io/left-behind=enforce")

    assert run(nodes, tmp_path, "--yes", "--labels=remove") == 0
    assert nodes.calls("label", "namespace", "shop", "podgate.io/mode-")
    assert nodes.calls("label", "node", "b", "podgate.io/max-mode-")
    assert "These labels stay" not in capsys.readouterr().out


@pytest.mark.parametrize("labels", ["keep", "remove"])
def test_labelled_namespace_that_is_deleted_meanwhile_stops_nothing(
    nodes: KubectlStandin,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    labels: str,
) -> None:
    serve_labels(nodes, shop="enforce", dev="enforce")
    gone = 'Error from server (NotFound): namespaces "shop" not found'
    nodes.respond("label", "namespace", "shop", error=gone)
    assert run(nodes, tmp_path, "--yes", f"--labels={labels}") == 0
    assert nodes.calls("label", "namespace", "dev")
    printed = capsys.readouterr().out
    assert "podgate is removed." in printed
    assert "namespace shop" not in printed


def test_labels_are_marked_before_the_daemonset_is_gone(
    nodes: KubectlStandin, tmp_path: pathlib.Path
) -> None:
    serve_labels(nodes, shop="enforce")
    own = {"metadata": {"name": "podgate", "labels": {"app.kubernetes.io/name": "podgate"}}}
    nodes.respond("get", "daemonsets.apps", output={"items": [own]})
    assert run(nodes, tmp_path, "--yes", "--labels=keep") == 0
    made = verbs(nodes)
    assert made.index("patch daemonset podgate") < made.index("label namespace shop")
    assert made.index("label namespace shop") < made.index("delete daemonsets.apps podgate")


def test_labels_of_pods_that_enforce_need_a_decision_and_wait_too(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_labels(nodes, dev="audit")
    pod = {"metadata": {"namespace": "dev", "name": "web"}}
    nodes.respond("get", "pods", "podgate.io/mode in (enforce,strict)", output={"items": [pod]})
    assert run(nodes, tmp_path, "--yes") == 1
    assert "namespace dev: podgate.io/mode=audit, 1 pods" in capsys.readouterr().out
    assert run(nodes, tmp_path, "--yes", "--labels=keep") == 0
    assert nodes.calls("label", "namespace", "dev", "podgate.io/left-behind=audit")
    # Their workloads would set them again, so they wait in any case.
    assert run(nodes, tmp_path, "--yes", "--labels=remove") == 0
    assert nodes.calls("label", "namespace", "dev", "podgate.io/left-behind=")
    assert "kubectl label namespace dev podgate.io/left-behind-" in capsys.readouterr().out


def test_label_of_a_node_that_stays_is_named(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_labels(nodes, dev="audit")
    left = """\
These labels stay. After the next installation, those that enforce have no
effect until you confirm them:
  namespace dev: podgate.io/mode=audit
    to remove: kubectl label namespace dev podgate.io/mode-
  node b: podgate.io/max-mode=off
    to remove: kubectl label node b podgate.io/max-mode-
"""
    assert run(nodes, tmp_path, "--yes") == 0
    assert capsys.readouterr().out.endswith(f"{left}podgate is removed.\n")
    run(nodes, tmp_path)
    assert capsys.readouterr().out.endswith(f" before.\n{left}Run it with --yes.\n")
    run(nodes, tmp_path, "--labels=remove")
    assert capsys.readouterr().out.endswith(" before.\nRun it with --yes.\n")


def test_plan_names_the_proxy_and_what_its_removal_stops(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = {"app.kubernetes.io/name": "podgate-proxy"}
    proxy = {"metadata": {"name": "podgate-proxy", "labels": labels}}
    agent = {"metadata": {"name": "podgate", "labels": {"app.kubernetes.io/name": "podgate"}}}
    items = [proxy, agent, {"metadata": {"name": "other"}}]
    nodes.respond("get", "daemonsets.apps", output={"items": items})
    assert run(nodes, tmp_path) == 1
    printed = capsys.readouterr().out
    assert "and the controller; podgate-proxy." in printed
    assert "Services that podgate-proxy carries stop" in printed


def forget_b(kubectl: KubectlStandin) -> None:
    """Node b had an agent, and the DaemonSet does not select it any more."""
    found = daemonset()
    found["spec"]["template"]["spec"]["nodeSelector"]["zone"] = "one"
    kubectl.respond("get", "daemonset", "podgate", output=found)
    items = [node("a", zone="one"), node("b")]
    kubectl.respond("get", "nodes", output={"items": items})
    pods = {"items": [agent_pod("a")]}
    kubectl.respond("get", "pods", "app.kubernetes.io/name=podgate", output=pods)
    reports = [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]
    kubectl.respond("get", "nodereports.podgate.io", output={"items": reports})
    kubectl.respond("create", output={"metadata": {"name": "made"}})


def test_node_that_the_daemonset_does_not_select_is_cleaned_by_a_pod_of_its_own(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_b(nodes)
    clean = [cleaning_pod("a", is_ready=True)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": clean})
    assert run(nodes, tmp_path, "--yes") == 1
    assert "1 of 2 nodes are not clean" in capsys.readouterr().out
    ((_, content),) = nodes.calls("create")
    pod = json.loads(content)
    assert pod["spec"]["nodeName"] == "b"
    assert pod["spec"]["containers"][0]["args"][0] == "cleanup"
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert "nodeSelector" not in pod["spec"]
    selector = daemonset()["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items()


def test_node_that_is_deleted_meanwhile_is_not_waited_for(
    nodes: KubectlStandin,
) -> None:
    """As one that an autoscaler removes: neither a Node nor a pod nor a report of it is left."""
    clean = [cleaning_pod("a", is_ready=True)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": clean})
    found = cleaning.verdicts(Cluster([nodes.command]), ["a", "b"])
    assert "the agent's pod is not replaced yet" in found[1].problem
    nodes.respond("get", "nodes", output={"items": [node("a")]})
    nodes.respond("get", "pods", "--namespace=podgate", output={"items": []})
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": clean})
    found = cleaning.verdicts(Cluster([nodes.command]), ["a", "b"])
    assert [(one.problem, one.state) for one in found] == [("", "clean"), ("", "deleted meanwhile")]


def test_one_forgotten_node_is_cleaned_alone(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_b(nodes)
    assert run(nodes, tmp_path, "--node=a", "--yes") == 1
    assert "a is selected by DaemonSet podgate" in capsys.readouterr().err
    assert run(nodes, tmp_path, "--node=nowhere", "--yes") == 1
    assert run(nodes, tmp_path, "--node=b") == 1
    assert "This removes podgate from b. Run it with --yes." in capsys.readouterr().out
    assert verbs(nodes) == []
    nodes.respond(
        "get",
        "app.kubernetes.io/name=podgate-cleanup",
        output={"items": [cleaning_pod("b", is_ready=True)]},
    )
    assert run(nodes, tmp_path, "--node=b", "--yes") == 0
    assert nodes.calls("create") == []
    assert verbs(nodes) == ["delete pods cleaner-b", "delete nodereports.podgate.io b"]
    assert capsys.readouterr().out.splitlines() == ["NODE  STATE", "b     clean"]


def test_forgotten_node_that_is_not_clean_keeps_its_report(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_b(nodes)
    left = [cleaning_pod("a", is_ready=True)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": left})
    assert run(nodes, tmp_path, "--node=b", "--yes") == 1
    ((_, content),) = nodes.calls("create", "--namespace=podgate")
    assert json.loads(content)["spec"]["nodeName"] == "b"
    assert capsys.readouterr().out.splitlines() == [
        "NODE  STATE",
        "b     no response: the agent's pod is not replaced yet; is the node's kubelet running?",
    ]
    assert verbs(nodes) == []


def test_every_object_of_the_chart_is_removed() -> None:
    everything = {
        "controller": {"enabled": True},
        "proxy": {"enabled": True},
        "hub": {"enabled": True},
        "services": {"enabled": True},
        "dashboards": {"enabled": True},
        "metrics": {"podMonitor": {"enabled": True}, "reader": {"name": "x", "namespace": "y"}},
    }
    removed = {kind.partition(".")[0] for kind in uninstall.KINDS}
    rendered = [
        one
        for values in (everything, *examples.VALUES.values())
        for one in rendering.objects(values)
    ]
    for one in rendered:
        name = one["metadata"]["labels"]["app.kubernetes.io/name"]
        assert name.startswith("podgate"), one["metadata"]["name"]
        kind = one["kind"].lower()
        plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
        assert plural in removed or kind == "namespace", kind


def test_forgotten_node_that_is_down_is_named_by_its_state(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = [node("a"), node("b", ready="Unknown")]
    nodes.respond("get", "nodes", output={"items": down})
    clean = [cleaning_pod("a", is_ready=True)]
    nodes.respond("get", "podgate.io/cleanup=uninstall", output={"items": clean})
    assert run(nodes, tmp_path, "--yes") == 1
    assert "b     no response: its Node is NotReady since" in capsys.readouterr().out


def test_uninstall_lists_only_podgates_namespace_and_announces_its_steps(
    nodes: KubectlStandin, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(nodes, tmp_path, "--yes")
    printed = capsys.readouterr()
    assert "Opening all gates ..." in printed.out + printed.err
    for kind in (*uninstall._WRITERS, *uninstall._NAMESPACED):
        calls = nodes.calls("get", kind)
        assert calls, kind
        assert all("--namespace=podgate" in call for call, _ in calls)
