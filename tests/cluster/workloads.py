"""Namespaces and pods that tests create, and what users see of them."""

import contextlib
import datetime
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests import polling
from tests.cluster.api import Api, Json
from tests.runtime import images

ISOLATION_READY = "podgate.io/isolation-ready"
PROBES_PASSING = "podgate.io/probes-passing"
MODE = "podgate.io/mode"
REASONS = {"": "Audit", "audit": "Audit", "enforce": "Enforced", "strict": "Strict"}
"""Of isolation-ready, by the label of the pod's namespace."""
PORT = 8080
_POLL_SECONDS = 0.1
# Controller manager, scheduler and kubelet list again late after an outage of the API server.
_LATE_SECONDS = 180
HTTP_PROBE: Json = {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 1}
WEB: Json = {
    "name": "web",
    "image": images.POD,
    "command": ["/bin/httpd", "-f", "-p", str(PORT), "-h", "/www"],
}
"""A container that serves /healthz."""
PROBED: Json = {
    **WEB,
    "startupProbe": {**HTTP_PROBE, "failureThreshold": 30},
    "readinessProbe": HTTP_PROBE,
    "livenessProbe": HTTP_PROBE,
}
"""The same with each kind of probe."""


class Workloads:
    """One namespace."""

    def __init__(self, api: Api, namespace: str, mode: str = "") -> None:
        """mode: the namespace's label."""
        self.api = api
        self.mode = mode
        self.namespace = namespace
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"

    def run(
        self,
        name: str,
        *containers: Json,
        gates: Sequence[str] = (),
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        **spec: Any,
    ) -> Json:
        """Create a pod. containers: `WEB` without any; gates: readiness gates."""
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {"app": name, **(labels or {})},
                "annotations": annotations or {},
            },
            "spec": {
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "readinessGates": [{"conditionType": gate} for gate in gates],
                "containers": list(containers) or [WEB],
                **spec,
            },
        }
        return self.api.create(self.pods_path, body)

    def pod(self, name: str) -> Json:
        return self.api.get(f"{self.pods_path}/{name}")

    def pods(self) -> list[Json]:
        return self.api.items(self.pods_path)

    def delete(self, name: str) -> None:
        self.api.delete(f"{self.pods_path}/{name}", gracePeriodSeconds="1")

    def until(self, name: str, kind: str, status: str = "True", reason: str = "") -> Json:
        """Wait until a pod has a condition, and return the pod. reason: any, if empty."""

        def check() -> Json | None:
            pod = self.pod(name)
            found = condition(pod, kind)
            holds = found.get("status") == status and reason in ("", found.get("reason"))
            if not holds:
                time.sleep(_POLL_SECONDS)
            return pod if holds else None

        return self._wait(name, f"{name} has {kind}={status} {reason}", check)

    def until_ready(self, *names: str) -> list[Json]:
        return [self.until(name, "Ready") for name in names]

    def until_isolated(self, *names: str) -> list[Json]:
        """Wait until these pods are Ready and isolated as the namespace's mode requires."""
        self.until_ready(*names)
        reason = REASONS[self.mode]
        return [self.until(name, ISOLATION_READY, "True", reason) for name in names]

    def confirm_labels(self) -> None:
        """Its labels outlived a removal of podgate, and are to be in force again."""
        labels = {"podgate.io/left-behind": None}
        self.api.patch(f"/api/v1/namespaces/{self.namespace}", {"metadata": {"labels": labels}})

    def until_gone(self, *names: str) -> None:
        def left() -> set[str]:
            return {pod["metadata"]["name"] for pod in self.pods()} & set(names)

        polling.wait_until(f"{', '.join(names)} are gone", lambda: not left())

    def restarts(self) -> dict[str, int]:
        """Of containers of all pods that restarted, by pod."""
        counts = {
            pod["metadata"]["name"]: sum(
                one["restartCount"] for one in pod["status"].get("containerStatuses", [])
            )
            for pod in self.pods()
        }
        return {name: count for name, count in counts.items() if count}

    def unhealthy(self) -> list[str]:
        """Failed probes, as the kubelet's Events have them."""
        return [
            f"{one['involvedObject']['name']}: {one['message']}" for one in self.events("Unhealthy")
        ]

    def events(self, reason: str) -> list[Json]:
        path = f"/api/v1/namespaces/{self.namespace}/events"
        return self.api.items(path, fieldSelector=f"reason={reason}")

    def _wait(self, name: str, what: str, check: Any) -> Json:
        try:
            found: Json = polling.wait_until(what, check, seconds=_LATE_SECONDS)
        except polling.TimedOutError as error:
            status = self.pod(name)["status"]
            kept = {key: status.get(key) for key in ("phase", "conditions", "containerStatuses")}
            raise AssertionError(f"{error}; its status is {kept}") from error
        return found


@contextlib.contextmanager
def namespace(api: Api, name: str, labels: dict[str, str] | None = None) -> Iterator[Workloads]:
    """A namespace with these labels; its pods are gone afterwards."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    body["metadata"]["labels"] = labels or {}  # type: ignore[index]
    api.create("/api/v1/namespaces", body)
    made = Workloads(api, name, (labels or {}).get(MODE, ""))
    try:
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        polling.wait_until(
            "the service account exists", lambda: api.find(path), seconds=_LATE_SECONDS
        )
        yield made
    finally:
        api.delete(made.pods_path, gracePeriodSeconds="1")
        what = f"the pods of {name} are gone"
        polling.wait_until(what, lambda: not made.pods(), seconds=_LATE_SECONDS)
        api.delete(f"/api/v1/namespaces/{name}")


def condition(pod: Json, kind: str) -> Json:
    """A condition of a pod; empty if it has none of this type."""
    found = [one for one in pod["status"].get("conditions", []) if one["type"] == kind]
    return found[0] if found else {}


def transition(pod: Json, kind: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(condition(pod, kind)["lastTransitionTime"])


def is_reachable(pod: Json, port: int = PORT) -> bool:
    """Whether this process, a process of the node, can connect to the pod."""
    try:
        socket.create_connection((pod["status"]["podIP"], port), 1).close()
    except (PermissionError, TimeoutError):
        return False
    return True
