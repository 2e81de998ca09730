"""What users and a stolen token may request of an API server with podgate's admission objects.

tests/cluster/test_admission.py queries a real one, and compares its answers with those that are
recorded; tests/agent/controller replays these without one.
"""

import dataclasses
import json
import pathlib
from typing import Any

Json = dict[str, Any]

RECORDED = pathlib.Path(__file__).parent / "recorded" / "admission.json"
NODE = "node1"
OTHER_NODE = "node2"
HOST = "169.254.169.254"


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A new object of a user, in a namespace with these labels."""

    name: str
    spec: Json
    kind: str = "Pod"
    annotations: Json = dataclasses.field(default_factory=dict)
    inject: str = "all"

    @property
    def body(self) -> Json:
        metadata: Json = {"name": self.name.replace(" ", "-").lower()}
        if self.annotations:
            metadata["annotations"] = self.annotations
        if self.kind == "Pod":
            return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.spec}
        return {"apiVersion": "apps/v1", "kind": self.kind, "metadata": metadata, "spec": self.spec}


def _pod(**more: Any) -> Json:
    return {"containers": [{"name": "app", "image": "example"}], **more}


def _probed(**container: Any) -> Json:
    ports = [{"name": "web", "containerPort": 8080}]
    return {"containers": [{"name": "app", "image": "example", "ports": ports, **container}]}


def _deployment(spec: Json) -> Json:
    selected = {"app": "web"}
    template = {"metadata": {"labels": selected}, "spec": spec}
    return {"selector": {"matchLabels": selected}, "template": template}


_ISOLATION, _PROBES = (
    {"conditionType": "podgate.io/isolation-ready"},
    {"conditionType": "podgate.io/probes-passing"},
)
_OTHER = {"conditionType": "example.com/ready"}

INJECTED = [
    Case("plain", _pod()),
    Case("isolation alone", _pod(), inject="isolation"),
    Case("probes alone", _pod(), inject="probes"),
    Case("unknown value", _pod(), inject="nothing"),
    Case("has one", _pod(readinessGates=[_ISOLATION])),
    Case("has both", _pod(readinessGates=[_PROBES, _ISOLATION])),
    Case("has another", _pod(readinessGates=[_OTHER])),
    Case("host network", _pod(hostNetwork=True)),
    Case("windows", _pod(os={"name": "windows"})),
    Case("windows by selector", _pod(nodeSelector={"kubernetes.io/os": "windows"})),
    Case(
        "mirror",
        _pod(nodeName=NODE),
        annotations={"kubernetes.io/config.mirror": "0123"},
    ),
]

HOSTS = [
    Case(
        "probe host",
        _probed(readinessProbe={"httpGet": {"port": 8080, "host": HOST}}),
        inject="",
    ),
    Case(
        "hook host",
        _probed(lifecycle={"preStop": {"httpGet": {"port": 80, "host": "metadata.internal"}}}),
        inject="",
    ),
    Case(
        "tcp host of an init container",
        {
            "initContainers": [
                {
                    "name": "side",
                    "image": "example",
                    "restartPolicy": "Always",
                    "startupProbe": {"tcpSocket": {"port": 22, "host": HOST}},
                }
            ],
            **_pod(),
        },
        inject="",
    ),
    Case(
        "deployment with host",
        _deployment(_probed(livenessProbe={"tcpSocket": {"port": 22, "host": HOST}})),
        kind="Deployment",
        inject="",
    ),
    Case(
        "host of a pod on the host network",
        _probed(livenessProbe={"httpGet": {"port": 10257, "host": "127.0.0.1"}})
        | {"hostNetwork": True},
        inject="",
    ),
    Case("no host", _probed(readinessProbe={"httpGet": {"port": 8080}}), inject=""),
]


def _annotated(name: str, text: str) -> Case:
    return Case(name, _probed(), annotations={"podgate.io/probe-spec": text}, inject="")


def _spec(**container: Any) -> str:
    containers = [{"name": "app", **container}]
    return json.dumps({"apiVersion": "podgate.io/v2", "containers": containers})


MISSPELT = _annotated("misspelt field", _spec(readiness={"http": {"port": 8080, "paht": "/"}}))
"""What only the webhook rejects."""
PROBE_SPECS = [
    _annotated("usable", _spec(readiness={"http": {"port": "web"}, "periodMilliseconds": 200})),
    _annotated("no JSON", "readiness: 8080"),
    MISSPELT,
    _annotated("unknown port", _spec(readiness={"tcp": {"port": "metrics"}})),
    _annotated("unknown version", _spec().replace("v2", "v9")),
    _annotated("no handler", _spec(startup={"periodSeconds": 1})),
    _annotated("with host", _spec(liveness={"tcp": {"port": 8080, "host": HOST}})),
    _annotated("too fast", _spec(readiness={"tcp": {"port": 8080}, "periodMilliseconds": 1})),
    _annotated("unknown container", _spec().replace("app", "other")),
]


def recorded() -> Json:
    """The server's answers, by group and case."""
    found: Json = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found
