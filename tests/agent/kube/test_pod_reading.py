"""Reading the API's pods: as manifests, except for settings that only the node may have."""

from typing import Any

import msgspec
import pytest

from agent import labels
from agent.kube import pod_reading
from agent.kube.objects import ApiPod
from agent.kube.pod_reading import PodReading
from agent.pods.pod import read_pod
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from probes.spec import probespec
from probes.spec.specs import DeclaredPorts, PodSpec, TcpSocket
from tests.agent.kube.apiserver import gated, pod, recorded

SECRET = "hunter2"


def decoded(thing: Any) -> ApiPod:
    return msgspec.json.decode(msgspec.json.encode(thing), type=ApiPod)


def reading(thing: Any) -> PodReading:
    return pod_reading.read(decoded(thing), PodModes(Mode.ENFORCE))


def with_containers(*containers: dict[str, Any], **metadata: Any) -> Any:
    made = gated("web", **metadata)
    made["spec"]["containers"] = list(containers)
    return made


def test_recorded_pod() -> None:
    found = decoded(recorded("pod-with-gate"))
    assert found.uid == "deecb517-768e-42ed-af43-05d0497bc45b"
    assert found.metadata.resource_version == "5515"
    assert found.spec.node_name == "node1"
    assert found.gates == {"podgate.io/ready"}
    assert [one.ip for one in found.status.pod_ips] == ["198.18.0.18", "fd00:18::12"]
    assert found.status.container_statuses[0].container_id.startswith("containerd://0527bf1f")
    assert found.status.container_statuses[0].state.running is not None
    condition = found.condition("podgate.io/ready")
    assert condition is not None
    assert condition.last_transition_time == "2026-11-21T01:00:11Z"
    assert condition.observed_generation == 99
    assert pod_reading.read(found, PodModes(Mode.AUDIT)).pod.full_name == "default/gated"


def test_mirror_pod_goes_by_the_runtimes_uid() -> None:
    found = decoded(recorded("mirror-pod"))
    assert found.is_mirror
    assert found.uid == "25fc56ec767d2a7cf6725c538f7206da"
    assert found.metadata.uid == "86b0b0e6-aee3-4e5a-962f-befd62d6faad"
    made = pod_reading.read(found, PodModes(Mode.AUDIT)).pod
    assert made.uid == "25fc56ec767d2a7cf6725c538f7206da"
    assert made.spec.declared == DeclaredPorts(ports=frozenset({8080}))


def test_secrets_are_not_held() -> None:
    thing = with_containers(
        {"name": "app", "env": [{"name": "PASSWORD", "value": SECRET}]},
        annotations={"kubectl.kubernetes.io/last-applied-configuration": SECRET},
    )
    found = decoded(thing)
    assert SECRET not in repr(found)
    assert SECRET.encode() not in msgspec.json.encode(found)


GOOD = {
    "name": "app",
    "ports": [{"name": "http", "containerPort": 8080}],
    "startupProbe": {"grpc": {"port": 9000}},
    "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 2},
    "livenessProbe": {"exec": {"command": ["true"]}},
    "lifecycle": {"preStop": {"httpGet": {"port": 8081}}},
}
SIDECAR = {"name": "side", "restartPolicy": "Always", "readinessProbe": {"tcpSocket": {"port": 1}}}


@pytest.mark.parametrize(
    "containers",
    [
        [GOOD],
        [{"name": "app", "readinessProbe": {"tcpSocket": {"port": "nowhere"}}}, {"name": "b"}],
        [{"name": "app", "readinessProbe": {"tcpSocket": {"port": 1, "host": "elsewhere"}}}],
        [{"name": "app", "readinessProbe": {}}, {"name": "app"}],
        [{"name": "app", "readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": "often"}}],
        [{"name": "app", "ports": [{"containerPort": "x"}], "readinessProbe": "yes"}],
        [{"name": "app", "livenessProbe": {"tcpSocket": {"port": 1}, "successThreshold": 2}}],
        [{"name": 7}, {"name": "b", "lifecycle": {"postStart": {"httpGet": {"port": 0}}}}],
    ],
)
def test_probes_and_their_mistakes_are_those_of_a_manifest(
    containers: list[dict[str, Any]],
) -> None:
    thing = with_containers(*containers)
    thing["spec"]["initContainers"] = [SIDECAR, {"name": "once"}]
    thing["metadata"]["annotations"] = {labels.NETNS_ANNOTATION: "/run/netns/web"}
    from_manifest = read_pod(thing, source="web.yaml")
    from_api = reading(thing).pod
    assert from_api.spec == from_manifest.spec
    assert from_api.probe_problem == from_manifest.probe_problem
    assert from_api.uid == from_manifest.uid


def test_network_namespace_is_never_taken_from_the_api() -> None:
    made = reading(pod("web", annotations={labels.NETNS_ANNOTATION: "/proc/1/ns/net"}))
    assert made.pod.netns_path is None
    assert made.pod.manifest_problem is None
    assert [warning.reason for warning in made.warnings] == [pod_reading.IGNORED]
    assert labels.NETNS_ANNOTATION in made.warnings[0].message


def test_pods_without_annotation_or_gate_are_probed_by_the_kubelet_only() -> None:
    thing = with_containers(GOOD)
    del thing["spec"]["readinessGates"]
    made = reading(thing).pod
    assert made.spec.containers == ()
    assert made.spec.declared == DeclaredPorts(True, frozenset({8080, 8081, 9000}))


@pytest.mark.parametrize(
    "asking",
    [
        {"annotations": {"podgate.io/probes": "agent"}},
        {"annotations": {"podgate.io/probe-spec": "{}"}},
    ],
)
def test_annotation_enables_probes(asking: dict[str, Any]) -> None:
    thing = with_containers(GOOD, **asking)
    del thing["spec"]["readinessGates"]
    assert reading(thing).pod.spec.containers[0].readiness is not None


def test_own_probe_spec_comes_with_the_annotation() -> None:
    text = (
        '{"apiVersion": "podgate.io/v2", "containers":'
        ' [{"name": "app", "readiness": {"tcp": {"port": 5}}}]}'
    )
    made = reading(pod("web", annotations={"podgate.io/probe-spec": text})).pod
    assert not made.spec.errors
    readiness = made.spec.containers[0].readiness
    assert readiness is not None
    assert isinstance(readiness.handler, TcpSocket)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"apiVersion": "podgate.io/v9"}', "x" * 300_000])
def test_malformed_probe_spec_is_the_probes_problem(text: str) -> None:
    made = reading(pod("web", annotations={"podgate.io/probe-spec": text})).pod
    assert made.probe_problem is not None
    assert made.probe_problem.reason == "InvalidProbeSpec"
    assert made.mode is Mode.ENFORCE


@pytest.mark.parametrize("annotation", ["podgate.io/probes", "podgate.io/relay"])
def test_unknown_word_of_an_annotation_is_a_warning(annotation: str) -> None:
    made = reading(pod("web", annotations={annotation: "please"}))
    assert made.pod.spec.containers == ()
    assert made.pod.is_relayed
    assert [warning.reason for warning in made.warnings] == [pod_reading.INVALID]
    assert annotation in made.warnings[0].message


def test_a_pod_may_go_without_the_relay() -> None:
    made = reading(pod("web", annotations={"podgate.io/relay": "off"}))
    assert not made.pod.is_relayed
    assert not made.warnings


def test_unknown_mode_is_in_the_condition_and_leaves_the_pod_gated() -> None:
    made = reading(pod("web", labels={labels.MODE_LABEL: "enfroce"}))
    assert made.pod.mode is Mode.ENFORCE
    [problem] = made.pod.mode_problems
    assert problem.reason == "InvalidMode"
    assert "'enfroce'" in problem.message
    assert made.warnings == (problem,)


@pytest.mark.parametrize(
    ("node", "mode"),
    [
        ({labels.MAX_MODE_LABEL: "audit"}, Mode.AUDIT),
        ({labels.MAX_MODE_LABEL: "low"}, Mode.ENFORCE),
    ],
)
def test_labels_of_the_node_are_no_warning_to_the_pods_author(
    node: dict[str, str], mode: Mode
) -> None:
    modes = PodModes(Mode.ENFORCE)
    modes.set_node(node)
    made = pod_reading.read(decoded(pod("web")), modes)
    assert made.pod.mode is mode
    assert len(made.pod.mode_problems) == 1
    assert not made.warnings


def test_unknown_fields_are_skipped() -> None:
    thing = with_containers({**GOOD, "future": {"x": [1]}})
    thing["spec"]["futureField"] = {"deep": [{}]}
    thing["future"] = 1
    assert reading(thing).pod.spec == reading(with_containers(GOOD)).pod.spec


def test_host_network_pods_are_part_of_the_node() -> None:
    thing = pod("web")
    thing["spec"]["hostNetwork"] = True
    made = reading(thing).pod
    assert made.host_network
    assert made.spec.host_network


def test_probe_that_sends_the_kubelet_elsewhere_is_a_warning_and_a_problem_of_the_pod() -> None:
    probe = {"httpGet": {"host": "169.254.169.254", "port": 80}}
    made = reading(with_containers({"name": "app", "image": "example", "livenessProbe": probe}))
    [problem] = made.pod.host_problems
    assert problem.reason == "ProbeHostNotAllowed"
    assert problem.message == (
        "liveness of container app has host '169.254.169.254', so the kubelet connects there and "
        "not to the pod; remove host."
    )
    # From which the Event is made.
    assert problem in made.warnings


def test_host_of_a_probe_on_the_host_network_is_no_problem() -> None:
    """As of kubeadm's static pods."""
    probe = {"httpGet": {"host": "127.0.0.1", "port": 10257, "scheme": "HTTPS"}}
    thing = with_containers({"name": "app", "image": "example", "livenessProbe": probe})
    thing["spec"]["hostNetwork"] = True
    assert reading(thing).pod.host_problems == ()


def test_probe_with_the_pod_s_own_address_is_no_problem() -> None:
    probe = {"tcpSocket": {"host": "198.18.0.18", "port": 80}}
    thing = with_containers({"name": "app", "image": "example", "readinessProbe": probe})
    thing["status"]["podIPs"] = [{"ip": "198.18.0.18"}]
    assert reading(thing).pod.host_problems == ()


def test_probe_hosts_are_problems_of_pods_that_only_the_kubelet_probes() -> None:
    thing = pod("plain")
    probe = {"httpGet": {"host": "metadata.internal", "port": 80}}
    thing["spec"]["containers"] = [{"name": "app", "image": "example", "startupProbe": probe}]
    made = reading(thing).pod
    assert made.spec.errors == ()
    assert [one.reason for one in made.host_problems] == ["ProbeHostNotAllowed"]


def test_spec_is_read_once_until_it_or_an_annotation_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = pod_reading.SpecReader()
    read: list[ApiPod] = []

    def read_spec(pod: ApiPod) -> PodSpec:
        read.append(pod)
        return original(pod)

    original = pod_reading.read_spec
    monkeypatch.setattr(pod_reading, "read_spec", read_spec)
    first = with_containers({"name": "app", "readinessProbe": {"tcpSocket": {"port": 80}}})
    spec = specs.read(decoded(first))
    ready = {**first, "status": {"phase": "Running"}}
    assert specs.read(decoded(ready)) is spec
    assert len(read) == 1
    other = with_containers({"name": "app", "readinessProbe": {"tcpSocket": {"port": 81}}})
    assert specs.read(decoded(other)) != spec
    annotated = with_containers(
        {"name": "app", "readinessProbe": {"tcpSocket": {"port": 81}}},
        annotations={probespec.ANNOTATION: "no JSON"},
    )
    assert specs.read(decoded(annotated)).errors
    specs.forget(decoded(other).uid)
    specs.read(decoded(annotated))
    assert len(read) == 4
