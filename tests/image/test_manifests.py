"""What is applied to a cluster holds together, and grants what the agent uses."""

import asyncio
import datetime
import pathlib

import click
import pytest
import yaml

from agent import labels
from agent.app.node_reporter import NodeReporter
from agent.controller import certificates
from agent.controller.settings import WEBHOOK_PORT
from agent.kube.api_pods import ApiPods
from agent.kube.client import ApiClient
from agent.kube.condition_writer import ConditionWriter
from agent.kube.events import EventRecorder
from agent.kube.node_report import NodeStatus
from agent.kube.token_reviews import Access, TokenReviews
from agent.operate.cli import main as cli
from agent.pods.conditions import TRUE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from agent.policy.api_callees import ApiCallees
from agent.policy.api_source import ApiPolicies, WatchedPolicies
from agent.policy.egress_types import HOST_EGRESS
from bpf.verdicts import Mode
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, server
from tests.agent.kube.test_token_reviews import Cluster
from tests.image import manifests, role

__all__ = ["api", "kubeconfig", "listening", "server"]


def _name(thing: manifests.Json) -> str:
    name: str = thing["metadata"]["name"]
    return name


def _agent_container() -> manifests.Json:
    (container,) = manifests.agent_pod("any")["spec"]["containers"]
    made: manifests.Json = container
    return made


def _parsed(command: str, arguments: list[str]) -> click.Context:
    """The command line of a container. Raises `click.UsageError`."""
    # A command keeps the help option of its first context, so that has the settings of podgate.
    root = click.Context(cli.main, **cli.main.context_settings)
    found = cli.main.get_command(root, command)
    assert found is not None
    return found.make_context(command, arguments, parent=root)


def test_every_file_is_applied() -> None:
    files = {path.name for path in manifests.DIRECTORY.glob("*.yaml")} - {"kustomization.yaml"}
    kinds = [thing["kind"] for thing in manifests.applied()]
    listed = yaml.safe_load((manifests.DIRECTORY / "kustomization.yaml").read_text("utf-8"))
    assert files == set(listed["resources"])
    # Each before what needs it.
    assert kinds[:3] == ["Namespace", "CustomResourceDefinition", "CustomResourceDefinition"]
    assert kinds.index("ResourceQuota") < kinds.index("DaemonSet")
    assert kinds.index("ClusterRoleBinding") < kinds.index("DaemonSet") < kinds.index("Deployment")


def test_objects_of_the_controller_name_each_other() -> None:
    name = "podgate-controller"
    found = {thing["kind"]: thing for thing in manifests.applied() if _name(thing) == name}
    assert found["Service"]["spec"]["selector"].items() <= (
        found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    )
    assert found["RoleBinding"]["roleRef"]["name"] == _name(found["Role"])
    assert found["RoleBinding"]["subjects"] == [
        {"kind": "ServiceAccount", "name": name, "namespace": "podgate"}
    ]
    deployment = found["Deployment"]["spec"]
    labels_of_pods = deployment["template"]["metadata"]["labels"].items()
    assert deployment["template"]["spec"]["serviceAccountName"] == name
    for selector in (deployment["selector"], found["PodDisruptionBudget"]["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels_of_pods
    # The DaemonSet does not select them.
    selected = manifests.of_kind("DaemonSet")["spec"]["selector"]["matchLabels"].items()
    assert not selected <= labels_of_pods


def test_arguments_and_ports_of_the_controller_are_those_of_the_command_line() -> None:
    spec = manifests.of_kind("Deployment", "podgate-controller")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    command, *arguments = container["args"]
    parsed = _parsed(command, arguments)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert parsed.params["http_address"] == ("", ports["http"])
    assert parsed.params["webhook_address"] == ("", ports["webhook"])
    service = manifests.of_kind("Service", "podgate-controller")
    assert [one["port"] for one in service["spec"]["ports"]] == [WEBHOOK_PORT]
    assert service["metadata"]["name"] == certificates.SERVICE_NAME
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"


def test_objects_name_each_other() -> None:
    namespace = manifests.of_kind("Namespace")["metadata"]["name"]
    account, binding = manifests.of_kind("ServiceAccount"), manifests.of_kind("ClusterRoleBinding")
    daemon_set = manifests.of_kind("DaemonSet")
    assert account["metadata"]["namespace"] == namespace == daemon_set["metadata"]["namespace"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": namespace}
    ]
    assert binding["roleRef"]["name"] == manifests.of_kind("ClusterRole")["metadata"]["name"]
    spec = daemon_set["spec"]
    assert spec["template"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_every_volume_is_mounted_and_every_mount_has_one() -> None:
    spec = manifests.agent_pod("any")["spec"]
    mounted = [mount["name"] for mount in _agent_container()["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in spec["volumes"])


def test_arguments_are_those_of_the_command_line() -> None:
    command, *arguments = _agent_container()["args"]
    parsed = _parsed(command, arguments)
    assert parsed.params["mode"] == Mode.AUDIT.label
    assert parsed.params["standby_seconds"] > 0


def test_the_only_probe_reads_the_pod_s_own_file() -> None:
    container = _agent_container()
    parsed = _parsed("run", container["args"][1:])
    directory = str(parsed.params["pod_directory"])
    assert {name for name in container if name.endswith("Probe")} == {"readinessProbe"}
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", f"{directory}/ready"]
    assert parsed.params["watchdog_seconds"] > 0
    # It has the lifetime of the pod.
    mounted = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in manifests.agent_pod("any")["spec"]["volumes"]}
    assert "emptyDir" in volumes[mounted[directory]]


def test_two_agents_fit_on_a_node_and_the_old_one_stays_until_the_new_one_has_proved_itself() -> (
    None
):
    spec = manifests.of_kind("DaemonSet")["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["minReadySeconds"] > 0
    # A declared port of a pod on the node's network is one that the scheduler gives once a node.
    assert "ports" not in _agent_container()


@pytest.mark.looptime
async def test_role_grants_exactly_the_requests(
    server: ApiServer,
    api: ApiClient,
    tmp_path: pathlib.Path,
) -> None:
    # With it only watches are requested.
    server.can_stream_lists = False
    server.put(apiserver.gated("web"))
    conditions = Conditions(now=lambda: datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC))
    writer = ConditionWriter(
        api,
        conditions_of=conditions.of,
        sandbox_of=lambda uid: "one",
        boot="b",
        is_withdrawn=lambda uid, kind: False,
    )
    source = ApiPods(
        api,
        node_name="node1",
        modes=PodModes(Mode.AUDIT),
        state=tmp_path / "pods.json",
    )
    events = EventRecorder(api, node_name="node1")
    policies = ApiPolicies(api, state=tmp_path / "policies.json")
    egress = WatchedPolicies(HOST_EGRESS, api, state=tmp_path / "egress.json")
    reporter = NodeReporter(
        api, "node1", status=lambda: NodeStatus("1"), node_uid=lambda: "uid-node1"
    )
    callees = ApiCallees(api, state=tmp_path / "callees.json")
    callees.need()
    parts = (source, writer, events, policies.watcher, egress.watcher, reporter, callees)
    running = [asyncio.create_task(one.run()) for one in parts]
    await asyncio.sleep(5)
    conditions.set(
        Pod(uid="uid-web", namespace="default", name="web"),
        *(labels.ISOLATION_READY, TRUE, "Audit", "All is well."),
    )
    actual = source.of_api("uid-web")
    assert actual is not None
    writer.set_pod(actual)
    for _ in range(20):
        found = source.get("uid-web")
        assert found is not None
        events.record(found, "GateLost", "It was put back.", action="Gating")
        await asyncio.sleep(60)
    Cluster(server)
    assert await TokenReviews(api, path="/metrics").access("good", "198.18.0.7") is Access.ALLOWED
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    # A server-side apply creates what does not exist.
    created = {("podgate.io", "nodereports", "create")}
    assert role.needed(server.received) | created == role.granted()
