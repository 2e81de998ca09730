"""The cluster, by the `kubectl` command: objects of the API, and commands in the agents' pods."""

import concurrent.futures
import dataclasses
import json
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

Object = dict[str, Any]
"""An object of the API, as decoded JSON."""

# Each is a process of 40 MB that mostly waits.
_AT_ONCE = 16
_APP = "app.kubernetes.io/name=podgate"
# What may run longer than a request: kubectl's start, and the connection.
_MARGIN_SECONDS = 10.0


class KubectlError(Exception):
    """A request failed; the message is one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentPod:
    """A running agent's pod, by its name."""

    name: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The output of a command in the agent's pod of a node. problem: one sentence if it failed."""

    node: str
    output: str = ""
    problem: str = ""


class Cluster:
    """One cluster. Methods block, and raise `KubectlError`."""

    def __init__(
        self,
        kubectl: Sequence[str] = ("kubectl",),
        *,
        namespace: str = "podgate",
        daemonset: str = "podgate",
        timeout_seconds: float = 10.0,
    ) -> None:
        """kubectl: the command with its global options; namespace, daemonset: podgate's;
        timeout_seconds: of each request, and of a command in a node's pod."""
        self.namespace = namespace
        self.daemonset = daemonset
        self.timeout_seconds = timeout_seconds
        self._kubectl = tuple(kubectl)

    def run(
        self, *arguments: str, content: str | None = None, timeout_seconds: float | None = None
    ) -> str:
        """Run kubectl; its output. content: its standard input."""
        seconds = (timeout_seconds or self.timeout_seconds) + _MARGIN_SECONDS
        try:
            done = subprocess.run(
                [*self._kubectl, *arguments],
                input=content,
                stdin=subprocess.DEVNULL if content is None else None,
                capture_output=True,
                timeout=seconds,
                check=False,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise KubectlError(
                f"{self._kubectl[0]} is not installed; install it, or name it with --kubectl"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise KubectlError(
                f"no response within {seconds:.0f} s: kubectl {shlex.join(arguments)}"
            ) from error
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise KubectlError(
                lines[-1] if lines else f"kubectl {arguments[0]} ended with {done.returncode}"
            )
        return done.stdout

    def get(self, resource: str, *arguments: str) -> Object:
        """An object, or a list of objects, as JSON."""
        request = f"--request-timeout={self.timeout_seconds:.0f}s"
        found = json.loads(self.run("get", resource, *arguments, "--output=json", request))
        if not isinstance(found, dict):
            raise KubectlError(f"kubectl get {resource} printed no object")
        return found

    def items(self, resource: str, *arguments: str) -> list[Object]:
        """All objects of a list."""
        found: list[Object] = self.get(resource, *arguments).get("items", [])
        return found

    def nodes(self) -> list[str]:
        """Names of the nodes that the agent is to run on, by the DaemonSet's node selector."""
        spec = self.get("daemonset", self.daemonset, f"--namespace={self.namespace}")["spec"]
        selector = spec["template"]["spec"].get("nodeSelector", {})
        labels = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
        return sorted(node["metadata"]["name"] for node in self.items("nodes", "-l", labels))

    def agents(self) -> list[AgentPod]:
        """Pods of the DaemonSet whose agent runs, at most one for each node: the youngest."""
        pods = self.items("pods", f"--namespace={self.namespace}", "-l", _APP)
        pods.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        found = {
            pod["spec"]["nodeName"]: pod["metadata"]["name"]
            for pod in pods
            if _is_owned(pod, self.daemonset) and _is_running(pod)
        }
        return [AgentPod(name, node) for node, name in sorted(found.items())]

    def query_nodes(
        self, *command: str, nodes: Iterable[str] | None = None, content: str | None = None
    ) -> list[NodeAnswer]:
        """Run a command in the agent's pod of each node, all at the same time, in order of nodes.

        nodes: None for all; content: the command's standard input.
        """
        pods = {agent.node: agent.name for agent in self.agents()}

        def query(node: str) -> NodeAnswer:
            if node not in pods:
                return NodeAnswer(node, problem="no agent runs on this node")
            stdin = () if content is None else ("--stdin",)
            place = (f"--namespace={self.namespace}", "--container=agent", pods[node])
            try:
                output = self.run("exec", *stdin, *place, "--", *command, content=content)
            except KubectlError as error:
                return NodeAnswer(node, problem=str(error))
            return NodeAnswer(node, output)

        chosen = self.nodes() if nodes is None else sorted(nodes)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(query, chosen))


def _is_owned(pod: Object, daemonset: str) -> bool:
    return any(
        (owner["kind"], owner["name"]) == ("DaemonSet", daemonset)
        for owner in pod["metadata"].get("ownerReferences", ())
    )


def _is_running(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "nodeName" in pod["spec"]
