"""A cluster in memory, in which pods of a run start, try and end at once."""

import copy
import json
from collections.abc import Callable
from typing import Any

from agent.operate.kubectl.cluster import KubectlError

Json = dict[str, Any]
Answer = Callable[[str, str, int], tuple[str, str]]
"""What a try of an address, protocol and port finds: outcome and detail."""

DAEMONSET: Json = {
    "metadata": {"name": "podgate", "namespace": "podgate", "uid": "d1"},
    "spec": {
        "template": {
            "spec": {
                "nodeSelector": {"kubernetes.io/os": "linux"},
                "imagePullSecrets": [{"name": "registry"}],
                "containers": [
                    {"name": "agent", "image": "podgate:1", "args": ["run", "--mode=audit"]}
                ],
            }
        }
    },
}
MISSING = "Error from server (NotFound): it is not there"
FORBIDDEN = "Error from server (Forbidden): pods is forbidden"


def closed(address: str, protocol: str, port: int) -> tuple[str, str]:
    return ("unclear", "no answer") if protocol == "UDP" else ("closed", "EPERM")


def opened(address: str, protocol: str, port: int) -> tuple[str, str]:
    return "open", "answered"


def sample(name: str, node: str = "a", **labels: str) -> Json:
    """A running pod that opted in."""
    return {
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": f"u-{name}",
            "labels": {"podgate.io/verify": "true", **labels},
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "app", "ports": [{"containerPort": 8080}]}],
        },
        "status": {"phase": "Running", "podIPs": [{"ip": "198.18.0.9"}, {"ip": "fd00:18::9"}]},
    }


class MadeCluster:
    """An `Access`. answer: of tries; canary: containers' state; has_gate_passed: whether agents
    write conditions; forbidden: words of paths whose requests by POST fail."""

    def __init__(self, *nodes: str, namespaces: Json | None = None) -> None:
        self.answer: Answer = closed
        self.canary = "running"
        self.has_gate_passed = True
        self.kubelet_passes = True
        self.daemonset: Json | None = DAEMONSET
        self.forbidden: list[str] = []
        self.samples: list[Json] = []
        self.pods: dict[str, Json] = {}
        self.made: list[Json] = []
        self.deleted: list[str] = []
        self.events: list[Json] = []
        self.commands: list[tuple[str, ...]] = []
        self.not_ready: list[str] = []
        self._nodes = nodes
        self._namespaces: Json = {"podgate": {}, "shop": {}} | (namespaces or {})

    def get(self, path: str) -> Json:
        path, _, query = path.partition("?")
        match path.strip("/").split("/"):
            case ["api", "v1", "nodes"]:
                return {"items": [self._node(name) for name in self._nodes]}
            case ["api", "v1", "namespaces"]:
                return {"items": [self._namespace(name) for name in self._namespaces]}
            case ["api", "v1", "namespaces", name]:
                return self._namespace(name)
            case [*_, "daemonsets", "podgate"]:
                if self.daemonset is None:
                    raise KubectlError(MISSING)
                return copy.deepcopy(self.daemonset)
            case [*_, "pods"] if "verify%3Dtrue" in query:
                return {"items": copy.deepcopy(self.samples)}
            case [*_, "pods"] if "name%3Dpodgate" in query and "verify" not in query:
                return {"items": [self._agent(name) for name in self._nodes if self.daemonset]}
            case [_, _, _, namespace, "pods"]:
                return {"items": [one for one in self._found(query) if _is_in(one, namespace)]}
            case [*_, "pods", name]:
                every = {one["metadata"]["name"]: one for one in self.samples} | self.pods
                if name not in every:
                    raise KubectlError(MISSING)
                return copy.deepcopy(every[name])
        raise AssertionError(path)

    def text(self, path: str) -> str:
        pod = self.pods[path.split("/")[-2]]
        return self._tried(pod["spec"]["containers"][0]["args"][0])

    def create(self, path: str, body: Json) -> Json:
        made = copy.deepcopy(body)
        kind = "node" if made.get("spec", {}).get("hostNetwork") else "canary"
        if any(word in (kind, path) or word in path for word in self.forbidden):
            raise KubectlError(FORBIDDEN)
        if made["kind"] == "Event":
            self.events.append(made)
            return made
        name = f"{made['metadata']['generateName']}{len(self.made)}"
        made["metadata"] |= {"name": name, "uid": name, "namespace": path.split("/")[4]}
        made["status"] = self._status(made)
        self.pods[name] = made
        self.made.append(made)
        return made

    def delete(self, path: str) -> None:
        name = path.partition("?")[0].rpartition("/")[2]
        if self.pods.pop(name, None) is None:
            raise KubectlError(MISSING)
        self.deleted.append(name)

    def run(self, namespace: str, pod: str, *command: str) -> str:
        self.commands.append((namespace, pod, *command))
        return self._tried(command[-1])

    def _tried(self, argument: str) -> str:
        lines = []
        for address, protocol, port in json.loads(argument):
            outcome, detail = self.answer(address, protocol, port)
            one = {"address": address, "protocol": protocol, "port": port}
            lines.append(json.dumps({**one, "outcome": outcome, "detail": detail}))
        return "\n".join(lines)

    def _status(self, pod: Json) -> Json:
        if pod["spec"].get("hostNetwork"):
            return {"phase": "Succeeded"}
        number = len(self.made)
        state = {self.canary: {"reason": "ImagePullBackOff"}}
        is_ready = self.canary == "running" and self.kubelet_passes
        is_gated = bool(pod["spec"].get("readinessGates"))
        ready = is_ready and (self.has_gate_passed or not is_gated)
        return {
            "phase": "Running" if self.canary == "running" else "Pending",
            "podIPs": [{"ip": f"198.18.1.{number}"}, {"ip": f"fd00:18::1:{number}"}],
            "containerStatuses": [{"name": "verify", "state": state}],
            "conditions": [
                {"type": "ContainersReady", "status": str(is_ready)},
                {"type": "Ready", "status": str(ready)},
            ],
        }

    def _found(self, query: str) -> list[Json]:
        found = list(self.pods.values())
        if "phase%3DFailed" in query:
            return [one for one in found if one["status"]["phase"] == "Failed"]
        node = query.rpartition("%3D")[2]
        return [one for one in found if one["spec"]["nodeName"] == node]

    def _node(self, name: str) -> Json:
        status = "False" if name in self.not_ready else "True"
        labels = {"kubernetes.io/os": "linux"}
        condition = {"type": "Ready", "status": status}
        return {
            "metadata": {"name": name, "labels": labels},
            "status": {"conditions": [condition]},
        }

    def _namespace(self, name: str) -> Json:
        return {"metadata": {"name": name, "labels": self._namespaces[name]}}

    def _agent(self, node: str) -> Json:
        return {
            "metadata": {
                "name": f"agent-{node}",
                "creationTimestamp": "2026-11-22T10:00:00Z",
                "ownerReferences": [{"kind": "DaemonSet", "name": "podgate"}],
            },
            "spec": {"nodeName": node},
            "status": {"phase": "Running"},
        }


def _is_in(pod: Json, namespace: str) -> bool:
    return bool(pod["metadata"]["namespace"] == namespace)
