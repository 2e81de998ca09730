"""Objects of the API in memory: bounded, whatever their authors wrote into them."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from agent import labels
from agent.kube import pod_reading
from agent.kube.objects import ApiPod
from agent.kubelet import kubelet_pb2, pods_api_reading
from agent.pods.pod_modes import PodModes
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import pod

# What one object may have in etcd.
OBJECT_BYTES = 1_500_000


def _filled(kind: str) -> dict[str, Any]:
    """A pod that is full of many small things of this kind."""
    made = pod("full")
    made["spec"]["readinessGates"] = [{"conditionType": labels.ISOLATION_READY}]
    container = made["spec"]["containers"][0]
    # By the smallest protobuf of each.
    match kind:
        case "labels":
            made["metadata"]["labels"] = {f"a{n}": "" for n in range(OBJECT_BYTES // 12)}
            made["metadata"]["labels"][labels.MODE_LABEL] = "strict"
        case "gates":
            made["spec"]["readinessGates"] = [
                *({"conditionType": "a"} for _ in range(OBJECT_BYTES // 5)),
                *made["spec"]["readinessGates"],
            ]
        case "ports":
            container["ports"] = [
                {"containerPort": 1 + n % 60000, "protocol": "TCP"}
                for n in range(OBJECT_BYTES // 12)
            ]
        case "headers":
            headers = [{"name": f"a{n}", "value": ""} for n in range(OBJECT_BYTES // 12)]
            container["readinessProbe"] = {"httpGet": {"port": 80, "httpHeaders": headers}}
        case "command":
            words = [f"{n:x}" for n in range(OBJECT_BYTES // 8)]
            container["livenessProbe"] = {"exec": {"command": words}}
        case "hooks":
            headers = [{"name": f"a{n}", "value": ""} for n in range(OBJECT_BYTES // 12)]
            container["lifecycle"] = {"preStop": {"httpGet": {"port": 80, "httpHeaders": headers}}}
    return made


@pytest.mark.parametrize("kind", ["labels", "gates", "ports", "headers", "command", "hooks"])
def test_pod_near_etcds_limit_keeps_little(kind: str) -> None:
    content = json.dumps(_filled(kind)).encode()
    tracemalloc.start()
    try:
        read = msgspec.json.decode(content, type=ApiPod)
        reading = pod_reading.read(read, PodModes(Mode.AUDIT, Mode.STRICT))
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
    finally:
        tracemalloc.stop()
    assert labels.ISOLATION_READY in read.gates
    if kind == "labels":
        assert reading.pod.mode is Mode.STRICT


def test_what_is_left_out_is_reported_and_the_rest_is_read() -> None:
    made = _filled("headers")
    probe = {"tcpSocket": {"port": 8080}}
    made["spec"]["containers"][0]["livenessProbe"] = probe
    made["spec"]["containers"].append({"name": "later", "readinessProbe": probe})
    made["spec"]["readinessGates"] = [{"conditionType": labels.PROBES_PASSING}]
    spec = pod_reading.read_spec(msgspec.convert(made, ApiPod))
    assert [(one.path, "more than podgate reads" in one.message) for one in spec.errors] == [
        ("spec.containers[0].readinessProbe", True)
    ]


def test_pod_of_the_kubelet_is_bounded_as_well() -> None:
    message = kubelet_pb2.Pod()
    message.metadata.name = message.metadata.uid = "full"
    message.spec.readinessGates.extend(
        kubelet_pb2.PodReadinessGate(conditionType="a") for _ in range(OBJECT_BYTES // 5)
    )
    read = pods_api_reading.read(message.SerializeToString())
    assert len(read.spec.readiness_gates) == 1
