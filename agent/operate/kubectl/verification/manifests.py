"""The pods that a run makes, and the Event that announces it.

The guard podgate-verify (deploy/chart/podgate/templates/verify.yaml) admits pods of these shapes
alone from users who may verify and no more: both change together.
"""

import dataclasses
import datetime
import json
from collections.abc import Sequence

from agent.labels import ISOLATION_READY, MODE_LABEL
from agent.operate.kubectl.cluster import Object
from agent.operate.kubectl.verification.canary import DECLARED

NAME = "podgate-verify"
"""The label app.kubernetes.io/name of all its pods."""
RUN_LABEL = "podgate.io/verify-run"

_PACKAGE = "agent.operate.kubectl.verification"
_PYTHON = ("/usr/bin/python3", "-B", "-m")
TRIES = (*_PYTHON, f"{_PACKAGE}.tries")
CANARY = (*_PYTHON, f"{_PACKAGE}.canary")
_NOT_ROOT = 65532


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """podgate's image, and how the DaemonSet pulls it."""

    name: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


def canary(
    image: Image, run: str, node: str, *, mode: str, has_agent: bool, life_seconds: int
) -> Object:
    """A pod without rights. mode: its own label, or empty; has_agent: whether an agent writes its
    conditions, so that it becomes Ready when it is in its mode."""
    made = _pod(image, run, node, CANARY, str(life_seconds), life_seconds)
    if mode:
        made["metadata"]["labels"][MODE_LABEL] = mode
    made["metadata"]["generateName"] = f"{NAME}-{mode or 'canary'}-"
    spec = made["spec"]
    if has_agent:
        spec["readinessGates"] = [{"conditionType": ISOLATION_READY}]
    spec["securityContext"] |= {"runAsNonRoot": True, "runAsUser": _NOT_ROOT}
    (container,) = spec["containers"]
    container["ports"] = [
        {"containerPort": DECLARED, "protocol": protocol} for protocol in ("TCP", "UDP")
    ]
    container["readinessProbe"] = {
        "tcpSocket": {"port": DECLARED},
        **{"periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1},
    }
    return made


def prober(
    image: Image, run: str, node: str, tries: Sequence[Sequence[object]], *, life_seconds: int
) -> Object:
    """A pod on the node's network, with CAP_NET_RAW for echo requests and no other right."""
    made = _pod(image, run, node, TRIES, json.dumps(tries), life_seconds)
    made["metadata"]["generateName"] = f"{NAME}-node-"
    made["spec"]["hostNetwork"] = True
    (container,) = made["spec"]["containers"]
    container["securityContext"]["capabilities"]["add"] = ["NET_RAW"]
    return made


def _pod(
    image: Image, run: str, node: str, command: Sequence[str], argument: str, life_seconds: int
) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "labels": {
                "app.kubernetes.io/name": NAME,
                "app.kubernetes.io/part-of": "podgate",
                RUN_LABEL: run,
            }
        },
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": life_seconds,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": name} for name in image.pull_secrets],
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "verify",
                    "image": image.name,
                    "imagePullPolicy": image.pull_policy,
                    "command": list(command),
                    "args": [argument],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "32Mi"},
                        "limits": {"memory": "64Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def event(of: Object, message: str, now: datetime.datetime) -> Object:
    """An Event of an object that the run concerns."""
    metadata = of["metadata"]
    time = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": f"{NAME}-", "namespace": metadata["namespace"]},
        "regarding": {
            **{name: of[name] for name in ("apiVersion", "kind")},
            **{name: metadata[name] for name in ("namespace", "name", "uid")},
        },
        "eventTime": time,
        "type": "Normal",
        "reason": "IsolationVerified",
        "action": "Verify",
        "note": message,
        "reportingController": f"podgate.io/{NAME}",
        "reportingInstance": NAME,
    }
