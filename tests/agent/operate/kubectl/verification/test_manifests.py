"""The pods that a run makes, whole: a guard of the chart admits no others."""

import datetime
from typing import Any

import pytest

from agent.operate.kubectl.verification import manifests
from agent.operate.kubectl.verification.manifests import Image

Json = dict[str, Any]
IMAGE = Image("podgate:1", "Always", ("secret",))
PACKAGE = "agent.operate.kubectl.verification"


def pod(metadata: Json, labels: Json, spec: Json, container: Json) -> Json:
    own = {
        "app.kubernetes.io/name": "podgate-verify",
        "app.kubernetes.io/part-of": "podgate",
        "podgate.io/verify-run": "r",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": {**own, **labels}, **metadata},
        "spec": {
            "nodeName": "a",
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 60,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": "secret"}],
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "verify",
                    "image": "podgate:1",
                    "imagePullPolicy": "Always",
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "32Mi"},
                        "limits": {"memory": "64Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    **container,
                }
            ],
            **spec,
        },
    }


@pytest.mark.parametrize(
    ("mode", "has_agent", "name", "labels", "gates"),
    [
        (
            *("strict", True, "podgate-verify-strict-", {"podgate.io/mode": "strict"}),
            {"readinessGates": [{"conditionType": "podgate.io/isolation-ready"}]},
        ),
        ("", False, "podgate-verify-canary-", {}, {}),
    ],
)
def test_canary_has_no_rights(
    mode: str, name: str, labels: Json, gates: Json, *, has_agent: bool
) -> None:
    container = {
        "command": ["/usr/bin/python3", "-B", "-m", f"{PACKAGE}.canary"],
        "args": ["60"],
        "ports": [
            {"containerPort": 8080, "protocol": "TCP"},
            {"containerPort": 8080, "protocol": "UDP"},
        ],
        "readinessProbe": {
            "tcpSocket": {"port": 8080},
            **{"periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1},
        },
    }
    context = {
        "seccompProfile": {"type": "RuntimeDefault"},
        **{"runAsNonRoot": True, "runAsUser": 65532},
    }
    made = manifests.canary(IMAGE, "r", "a", mode=mode, has_agent=has_agent, life_seconds=60)
    spec = {"securityContext": context, **gates}
    assert made == pod({"generateName": name}, labels, spec, container)


def test_pod_on_the_nodes_network_may_send_echo_requests_alone() -> None:
    tries = [("198.18.0.9", "TCP", 80)]
    made = manifests.prober(IMAGE, "r", "a", tries, life_seconds=60)
    container = {
        "command": ["/usr/bin/python3", "-B", "-m", f"{PACKAGE}.tries"],
        "args": ['[["198.18.0.9", "TCP", 80]]'],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["NET_RAW"]},
        },
    }
    spec = {"hostNetwork": True}
    assert made == pod({"generateName": "podgate-verify-node-"}, {}, spec, container)


def test_event_is_of_its_object() -> None:
    of = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": "web", "uid": "u", "labels": {}},
    }
    at = datetime.datetime(2026, 1, 1, 13, tzinfo=datetime.timezone(datetime.timedelta(hours=1)))
    assert manifests.event(of, "It is tried.", at) == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": "podgate-verify-", "namespace": "shop"},
        "regarding": {
            **{"apiVersion": "v1", "kind": "Pod"},
            **{"namespace": "shop", "name": "web", "uid": "u"},
        },
        "eventTime": "2026-01-01T12:00:00.000000Z",
        "type": "Normal",
        "reason": "IsolationVerified",
        "action": "Verify",
        "note": "It is tried.",
        "reportingController": "podgate.io/podgate-verify",
        "reportingInstance": "podgate-verify",
    }
