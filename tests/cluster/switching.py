"""Pods whose server a test switches (tests/cluster/switched.py), one probe each."""

import dataclasses
import inspect
import itertools
import json
import os
import random
from collections.abc import Sequence
from typing import Any

from probes.spec.probespec import ANNOTATION, API_VERSION
from tests.cluster import kubelet_log, switched
from tests.cluster.api import Json
from tests.cluster.kubelet import DIRECTORY
from tests.cluster.kubelet_log import Conclusion, Result
from tests.cluster.one_node import IMAGE, OneNode
from tests.cluster.workloads import ISOLATION_READY, Workloads

LIVENESS, STARTUP, READINESS = KINDS = ("liveness", "startup", "readiness")
OWN: dict[str, Json] = {
    "http": {"httpGet": {"port": switched.OWN_HTTP, "path": "/own"}},
    "grpc": {"grpc": {"port": switched.OWN_GRPC, "service": "own"}},
    "tcp": {"tcpSocket": {"port": switched.OWN_TCP}},
}
"""The kubelet's probe, in the pod's spec."""
CHECKS: dict[str, Json] = {
    "http": {"http": {"port": switched.HTTP, "path": "/"}},
    "headers": {
        "http": {
            "port": switched.HTTP,
            "path": "/headers",
            "httpHeaders": [{"name": switched.HEADER, "value": "1"}],
        }
    },
    "https": {"http": {"port": switched.HTTPS, "scheme": "HTTPS"}},
    "h2c": {"http": {"port": switched.H2C, "protocol": "HTTP2"}},
    "grpc": {"grpc": {"port": switched.GRPC, "service": "checked"}},
    "grpcs": {"grpc": {"port": switched.GRPCS, "mode": "TLS"}},
    "tcp": {"tcp": {"port": switched.TCP}},
}
"""podgate's probe, in the annotation."""
TARGETS: dict[str, Json] = {
    "any": {},
    "IPv4": {"ipFamily": "IPv4"},
    "IPv6": {"ipFamily": "IPv6"},
    "each": {"ipFamilyPolicy": "RequireDualStack"},
    "localhost": {"target": "localhost"},
}
_VOLUME = "state"
VOLUMES: list[Json] = [
    {"name": "app", "configMap": {"name": "app"}},
    {"name": _VOLUME, "emptyDir": {}},
]
"""Of each pod that runs the server."""
# podgate checks twice as often as the kubelet reads the verdict. On a busy machine a verdict that
# ends sooner would end before the next check.
_CHECK = {"periodMilliseconds": 500, "timeoutMilliseconds": 1000}
# The server listens by then, and podgate has a verdict of startup. Also for liveness: where the
# kubelet finds at once that a container has ended and the next one runs, it takes the next one as
# started (1.36: pkg/kubelet/kubelet_pods.go, convertToAPIContainerStatuses, copies `started`), and
# probes its liveness before its startup.
_DELAY_SECONDS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of the table, and its pod. check: of CHECKS, or empty: the probe is proxied."""

    kind: str
    own: str
    check: str
    target: str
    fault: str
    failures: int
    """failureThreshold of the pod's spec; podgate's own is larger than all of the table."""
    number: int = 0

    @property
    def name(self) -> str:
        words = (self.own, self.check or "proxied", self.target, self.fault, str(self.failures))
        return "-".join((*words, str(self.number))).lower()

    @property
    def is_answered(self) -> bool:
        return bool(self.check)

    @property
    def part(self) -> str:
        """The part of the server on which the pod's health depends."""
        return switched.CHECKED if self.is_answered else switched.OWN

    @property
    def successes(self) -> int:
        """successThreshold, which is 1 for liveness and startup."""
        return self.failures if self.kind == READINESS else 1

    def container(self) -> Json:
        probe = {
            **OWN[self.own],
            "periodSeconds": 1,
            "failureThreshold": self.failures,
            "successThreshold": self.successes,
        }
        made: Json = {
            "name": "app",
            "image": IMAGE,
            "command": ["/usr/bin/python3", "/app/switched.py", "/app", f"/{_VOLUME}/health"],
            "volumeMounts": [
                {"name": "app", "mountPath": "/app"},
                {"name": _VOLUME, "mountPath": f"/{_VOLUME}"},
            ],
        }
        if self.kind == STARTUP:
            made["env"] = [{"name": f"FIRST_{self.part.upper()}", "value": self.fault}]
            probe["initialDelaySeconds"] = _DELAY_SECONDS
        else:
            # Of the server itself, which may take long; proxied, and no part of the table. Not
            # http: its redirects might lead to a port of tcp, which would be proxied then.
            made["startupProbe"] = {
                "grpc": {"port": switched.PLAIN},
                "periodSeconds": 1,
                "failureThreshold": 120,
            }
            if self.kind == LIVENESS:
                probe["initialDelaySeconds"] = _DELAY_SECONDS
        return made | {f"{self.kind}Probe": probe}

    def annotations(self) -> dict[str, str]:
        if not self.is_answered:
            return {}
        check = {**CHECKS[self.check], **TARGETS[self.target], **_CHECK}
        # A threshold that would be applied as well would show: the kubelet's are at most 3.
        container = {"name": "app", self.kind: check | {"answered": True, "failureThreshold": 50}}
        return {ANNOTATION: json.dumps({"apiVersion": API_VERSION, "containers": [container]})}


def answered(kind: str) -> list[Row]:
    """The rows of one kind, of a table in which each pair of values of two columns occurs.

    Found by taking the row with the most pairs that are missing. A port is open or closed, so tcp
    is never sick and never hangs.
    """
    thresholds = (1, 2, 3)
    faults = (switched.SICK, switched.HUNG, switched.DEAD)
    candidates = [
        row
        for row in itertools.product(KINDS, OWN, CHECKS, TARGETS, faults, thresholds)
        if row[2] != "tcp" or row[4] == switched.DEAD
    ]
    # Between equals any; in the product's order the first values would fill the rest of the table.
    random.Random(0).shuffle(candidates)
    missing = {pair for row in candidates for pair in _pairs(row)}
    found = []
    while missing:
        best = max(candidates, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        found.append(best)
    return [Row(*row, number) for number, row in enumerate(found) if row[0] == kind]


def proxied(kind: str) -> list[Row]:
    """Probes of pods without the annotation."""
    return [
        Row(kind, "http", "", "any", switched.SICK, 1),
        Row(kind, "http", "", "any", switched.DEAD, 2),
        Row(kind, "grpc", "", "any", switched.SICK, 2),
        Row(kind, "grpc", "", "any", switched.HUNG, 3),
        Row(kind, "tcp", "", "any", switched.DEAD, 3),
    ]


def _pairs(row: Sequence[Any]) -> set[Any]:
    return set(itertools.combinations(enumerate(row), 2))


class SwitchedPod:
    """A pod of one row, its server's health, and what the kubelet has logged about it."""

    def __init__(self, users: Workloads, node: OneNode, row: Row) -> None:
        self.row = row
        self._users = users
        self._log = node.kubelet.daemon.log
        self._uid: str = users.run(
            row.name,
            row.container(),
            gates=(ISOLATION_READY,),
            annotations=row.annotations(),
            volumes=VOLUMES,
        )["metadata"]["uid"]

    def switch(self, **health: str) -> None:
        """Set the health of one part, or of both."""
        directory = DIRECTORY / f"pods/{self._uid}/volumes/kubernetes.io~empty-dir/{_VOLUME}"
        file = directory / "health"
        new = directory / "new"
        new.write_text(json.dumps(json.loads(file.read_text()) | health))
        os.replace(new, file)

    def results(self, since: float = 0) -> list[Result]:
        """Of the kubelet's probes of this row's kind that ended since then."""
        found = kubelet_log.of_pod(self._log, self._users.namespace, self.row.name).results
        return [one for one in found if one.kind == self.row.kind and one.seconds >= since]

    def conclusions(self, since: float = 0) -> list[Conclusion]:
        found = kubelet_log.of_pod(self._log, self._users.namespace, self.row.name).conclusions
        return [one for one in found if one.seconds >= since]

    def status(self) -> Json:
        """Of its container."""
        statuses = self._users.pod(self.row.name)["status"].get("containerStatuses", [])
        return statuses[0] if statuses else {}

    def ended(self) -> float:
        """When the container that the kubelet killed exited, on the wall clock."""
        # Not from the pod's status: the kubelet's garbage collection, once a minute, also removes a
        # container that ended a moment ago if the next one is created and does not run yet.
        (exited,) = (one.seconds for one in self.conclusions() if one.what == "exited")
        return exited

    def events(self, reason: str) -> list[Json]:
        found = self._users.events(reason)
        return [one for one in found if one["involvedObject"]["name"] == self.row.name]

    def requests(self) -> int:
        """Of probes and hooks to the part `own`, in this life of the container."""
        path = f"{self._users.pods_path}/{self.row.name}/log?container=app"
        return self._users.api.text(path).count(f"{switched.OWN} ")


def provide(users: Workloads, node: OneNode) -> None:
    """The server and its certificate, for pods of this namespace."""
    pki = node.control_plane.pki
    pki.sign("app", user="app", hosts="DNS:app")
    data = {
        "switched.py": inspect.getsource(switched),
        "tls.crt": pki.certificate("app").read_text(),
        "tls.key": pki.key("app").read_text(),
    }
    path = f"/api/v1/namespaces/{users.namespace}/configmaps"
    users.api.create(path, {"metadata": {"name": "app"}, "data": data})
