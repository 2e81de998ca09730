"""The cluster, by the `kubectl` command: objects of the API, and commands in the agents' pods."""

import concurrent.futures
import dataclasses
import json
import re
import shlex
import subprocess
from collections.abc import Collection, Iterable, Sequence
from typing import Any

Object = dict[str, Any]
"""An object of the API, as decoded JSON."""

# Each is a process of 40 MB that mostly waits.
_AT_ONCE = 16
_CONTAINER = "agent"
_APP = "app.kubernetes.io/name=podgate"
# What may run longer than a request: kubectl's start, and the connection.
_MARGIN_SECONDS = 10.0


# Of click, in `podgate` of an earlier version.
_UNKNOWN_COMMAND = "No such command"
# kubectl's last line after a command in a pod that failed; the command's own are before it.
_EXIT_TEXT = re.compile(r"command terminated with exit code \d+")


class KubectlError(Exception):
    """A request failed; the message is one sentence.

    exit_status: kubectl's, which for `kubectl exec` is the command's; output: what it printed.
    """

    def __init__(self, message: str, *, exit_status: int = 1, output: str = "") -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.output = output


@dataclasses.dataclass(frozen=True, slots=True)
class AgentPod:
    """A running agent's pod, by its name. problem: why its container does not run, or empty."""

    name: str
    node: str
    is_ready: bool = True
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The output of a command in the agent's pod of a node.

    problem: a sentence without its full stop if there is no output; exit_status: the command's;
    is_ready: whether the agent's pod is Ready.
    """

    node: str
    output: str = ""
    problem: str = ""
    exit_status: int = 0
    is_ready: bool = False


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
            raise self._missing() from error
        except subprocess.TimeoutExpired as error:
            raise KubectlError(
                f"no response within {seconds:.0f} s: kubectl {shlex.join(arguments)}"
            ) from error
        if done.returncode:
            raise KubectlError(
                last_line(done.stderr) or f"kubectl {arguments[0]} ended with {done.returncode}",
                exit_status=done.returncode,
                output=done.stdout,
            )
        return done.stdout

    def open(self, *arguments: str) -> subprocess.Popen[str]:
        """Start kubectl for a stream; its output, and errors in between, can be read as lines.

        The caller ends it. Its standard input is a pipe, which is closed however the caller ends.
        Raises `KubectlError`.
        """
        try:
            return subprocess.Popen(
                [*self._kubectl, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # Ctrl-C is for the caller, which ends all of them.
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise self._missing() from error

    def _missing(self) -> KubectlError:
        return KubectlError(
            f"{self._kubectl[0]} is not installed; install it, or name it with --kubectl"
        )

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
            pod["spec"]["nodeName"]: pod
            for pod in pods
            if _is_owned(pod, self.daemonset) and _is_running(pod)
        }
        return [
            AgentPod(pod["metadata"]["name"], node, _is_ready(pod), _problem(pod))
            for node, pod in sorted(found.items())
        ]

    def place(self, pod: str) -> tuple[str, ...]:
        """Arguments of `kubectl exec` for the agent's container of a pod."""
        return (f"--namespace={self.namespace}", f"--container={_CONTAINER}", pod)

    def query_nodes(
        self,
        *command: str,
        nodes: Iterable[str] | None = None,
        content: str | None = None,
        answers_with: Collection[int] = (0,),
    ) -> list[NodeAnswer]:
        """Run a command in the agent's pod of each node, all at the same time, in order of nodes.

        nodes: None for all; content: the command's standard input; answers_with: exit statuses of
        the command whose output is an answer.
        """
        pods = {agent.node: agent for agent in self.agents()}

        def query(node: str) -> NodeAnswer:
            agent = pods.get(node)
            if agent is None:
                return NodeAnswer(node, problem="no agent runs on this node")
            stdin = () if content is None else ("--stdin",)
            place = self.place(agent.name)
            try:
                output = self.run("exec", *stdin, *place, "--", *command, content=content)
            except KubectlError as error:
                if error.exit_status in answers_with and error.output.strip():
                    status, ready = error.exit_status, agent.is_ready
                    return NodeAnswer(node, error.output, exit_status=status, is_ready=ready)
                problem = agent.problem or str(error)
                if _UNKNOWN_COMMAND in problem:
                    problem = f"its agent is of a version without 'podgate {command[1]}'"
                return NodeAnswer(node, problem=problem, exit_status=error.exit_status)
            return NodeAnswer(node, output, is_ready=agent.is_ready)

        chosen = self.nodes() if nodes is None else sorted(nodes)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(query, chosen))


def last_line(text: str) -> str:
    """Of kubectl's errors, without a text that reports only that there was one."""
    lines = text.strip().splitlines()
    if len(lines) > 1 and _EXIT_TEXT.fullmatch(lines[-1]):
        lines.pop()
    return lines[-1] if lines else ""


def _is_owned(pod: Object, daemonset: str) -> bool:
    return any(
        (owner["kind"], owner["name"]) == ("DaemonSet", daemonset)
        for owner in pod["metadata"].get("ownerReferences", ())
    )


def _is_running(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "nodeName" in pod["spec"]


def _is_ready(pod: Object) -> bool:
    return any(
        (one["type"], one["status"]) == ("Ready", "True")
        for one in pod.get("status", {}).get("conditions", ())
    )


def _problem(pod: Object) -> str:
    """Why the agent's container does not run: kubectl exec reports only that it is not found."""
    for one in pod.get("status", {}).get("containerStatuses", ()):
        if one.get("name") == _CONTAINER:
            for kind, state in (one.get("state") or {}).items():
                if kind != "running":
                    reason = state.get("reason") or kind
                    return f"its agent does not run: {reason} after {one['restartCount']} restarts"
    return ""
