"""The cluster, by the `kubectl` command: objects of the API, and commands in the agents' pods."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import re
import shlex
import subprocess
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from agent.operate.kubectl import agent_pods, printing
from agent.operate.kubectl import nodes as node_facts
from agent.operate.kubectl.agent_pods import CONTAINER, AgentPod
from agent.operate.kubectl.nodes import ClusterNode

Object = dict[str, Any]
"""An object of the API, as decoded JSON."""

# Each is a process of 40 MB that mostly waits.
_AT_ONCE = 16
AGENTS = "app.kubernetes.io/name=podgate"
"""Selects the agents' pods."""
# What may run longer than a request: kubectl's start, and the connection.
_MARGIN_SECONDS = 10.0


# Of click, in `podgate` of an earlier version.
_UNKNOWN_COMMAND = "No such command"
# kubectl's last line after a command in a pod that failed; the command's own are before it.
_EXIT_TEXT = re.compile(r"command terminated with exit code \d+")
# kubectl's own errors, or the API server's: the command in the pod did not start, or was cut off.
_KUBECTL_ERROR = re.compile(r"(Error from server( \(\w+\))?|error): (error dialing backend: )?")
_REPORTS = "nodereports.podgate.io"


class KubectlError(Exception):
    """A request failed; the message is one sentence.

    exit_status: kubectl's, which for `kubectl exec` is the command's; output: what it printed.
    """

    def __init__(self, message: str, *, exit_status: int = 1, output: str = "") -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.output = output


class NoResponseError(KubectlError):
    """kubectl did not end in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadAnswer:
    """An answer of the agents' read-only API. name: such as "status"; query: of its request."""

    name: str
    query: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The output of a command in the agent's pod of a node.

    problem: a sentence without its full stop if there is no output; exit_status: the command's;
    is_ready: whether the agent's pod is Ready; has_agent: whether an agent's container runs there;
    is_selected: whether the DaemonSet selects the node.
    """

    node: str
    output: str = ""
    problem: str = ""
    exit_status: int = 0
    is_ready: bool = False
    has_agent: bool = True
    is_selected: bool = True


class AnswerReader(Protocol):
    """Reads agents' answers without commands in their pods."""

    def get(self, agent: AgentPod, answer: str, **query: str) -> str:
        """As JSON. Raises `KubectlError`."""


class PodMaker(Protocol):
    """Makes a pod on a node whose agent does not run."""

    def ensure(self, node: str) -> str:
        """The name of the pod, once commands can run in its container. Raises `KubectlError`."""


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
        self.debug_pods: PodMaker | None = None
        """For nodes whose agent does not run; None: these have no answer."""
        self.reader: AnswerReader | None = None
        """Tried before commands; None: only commands read."""
        self._kubectl = tuple(kubectl)
        self._is_warned = False

    def run(
        self,
        *arguments: str,
        content: str | None = None,
        timeout_seconds: float | None = None,
        margin_seconds: float | None = None,
    ) -> str:
        """Run kubectl; its output. content: its standard input; margin_seconds: for kubectl itself,
        beside timeout_seconds, which is the request's."""
        margin = _MARGIN_SECONDS if margin_seconds is None else margin_seconds
        seconds = (timeout_seconds or self.timeout_seconds) + margin
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
            raise NoResponseError(
                f"no response within {seconds:.0f} s: kubectl {shlex.join(arguments)}"
            ) from error
        if done.returncode:
            raise KubectlError(
                last_line(done.stderr) or f"kubectl {arguments[0]} ended with {done.returncode}",
                exit_status=done.returncode,
                output=done.stdout,
            )
        return done.stdout

    def open(self, *arguments: str, ends_with_input: bool = False) -> subprocess.Popen[str]:
        """Start kubectl for a stream; its output, and errors in between, can be read as lines.

        The caller ends it. Its standard input is a pipe, which is closed however the caller ends.
        ends_with_input: also of a command that does not read it. Raises `KubectlError`.
        """
        # The shell's background command has no input, and has the output alone: they end together.
        script = '"$@" & exec >/dev/null 2>&1; cat; kill $!'
        follow = ("sh", "-c", script, "sh") if ends_with_input else ()
        try:
            return subprocess.Popen(
                [*follow, *self._kubectl, *arguments],
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

    def names(self, resource: str) -> list[str]:
        """Names of all objects of a kind, in the context's namespace if it has namespaces."""
        request = f"--request-timeout={self.timeout_seconds:.0f}s"
        printed = self.run("get", resource, "--output=name", request)
        return [line.partition("/")[2] for line in printed.splitlines()]

    def agent_daemonset(self) -> Object:
        """The DaemonSet of the agents."""
        return self.get("daemonset", self.daemonset, f"--namespace={self.namespace}")

    def all_nodes(self) -> list[ClusterNode]:
        """All nodes that the agent is to run on, or ever ran on, in order of names."""
        had_agent = {agent.node for agent in self.agents()}
        try:
            had_agent.update(one["metadata"]["name"] for one in self.items_if_served(_REPORTS))
        except KubectlError as error:
            self._warn(f"Nodes that the DaemonSet does not select are missing: {error}", error)
        try:
            return node_facts.collect(self.agent_daemonset(), self.items("nodes"), had_agent)
        except KubectlError as error:
            self._warn(f"Nodes without an agent are missing: {error}", error)
            return [ClusterNode(name) for name in sorted(had_agent)]

    def _warn(self, text: str, error: KubectlError) -> None:
        """Once, of a right that the user lacks. Raises any other error."""
        if not is_forbidden(error):
            raise error
        if not self._is_warned:
            self._is_warned = True
            printing.progress(text)

    def _without_agent(self, name: str) -> ClusterNode:
        """A node that the agent never ran on."""
        found = self.items("nodes", f"--field-selector=metadata.name={name}")
        exists = any(one["metadata"]["name"] == name for one in found)
        return ClusterNode(name, is_selected=False, problem="" if exists else node_facts.MISSING)

    def nodes(self) -> list[str]:
        """Their names."""
        return [node.name for node in self.all_nodes()]

    def nodes_with(self, labels: str) -> list[str]:
        """Names of the nodes with an agent, now or before, that a selector of labels selects."""
        selected = {one["metadata"]["name"] for one in self.items("nodes", "-l", labels)}
        found = [name for name in self.nodes() if name in selected]
        if not found:
            raise KubectlError(f"no node with an agent has the labels {labels}")
        return found

    def items_if_served(self, resource: str, *arguments: str) -> list[Object]:
        """All objects of a kind; none of a kind that the server does not have."""
        try:
            return self.items(resource, *arguments)
        except KubectlError as error:
            if "doesn't have a resource type" in str(error):
                return []
            raise

    def agents(self) -> list[AgentPod]:
        """Pods of the DaemonSet whose agent runs, at most one for each node: the youngest."""
        return agent_pods.youngest(self.agent_pods(), self.daemonset)

    def agent_pods(self) -> list[Object]:
        """All pods of agents, as objects."""
        return self.items("pods", f"--namespace={self.namespace}", "-l", AGENTS)

    def place(self, pod: str) -> tuple[str, ...]:
        """Arguments of `kubectl exec` for the agent's container of a pod."""
        return (f"--namespace={self.namespace}", f"--container={CONTAINER}", pod)

    def query_nodes(
        self,
        *command: str,
        nodes: Iterable[str] | None = None,
        content: str | None = None,
        answers_with: Collection[int] = (0,),
        debug_pods: PodMaker | None = None,
        read: ReadAnswer | None = None,
        agents: Iterable[AgentPod] | None = None,
    ) -> list[NodeAnswer]:
        """Run a command in the agent's pod of each node, all at the same time, in order of nodes.

        :param nodes: None for all.
        :param content: the command's standard input.
        :param answers_with: exit statuses of the command whose output is an answer.
        :param debug_pods: where no agent runs, instead of the cluster's.
        :param read: the same answer by the cluster's reader, which is tried first.
        :param agents: if the caller has read them.
        """
        pods = {agent.node: agent for agent in (self.agents() if agents is None else agents)}
        makers = debug_pods or self.debug_pods
        stdin = () if content is None else ("--stdin",)
        lock = threading.Lock()

        @functools.cache
        def read_all() -> dict[str, ClusterNode]:
            return {node.name: node for node in self.all_nodes()}

        def fact(node: str) -> ClusterNode:
            """Read only if a node has no answer, and not by all users."""
            with lock, contextlib.suppress(KubectlError):
                return read_all().get(node) or self._without_agent(node)
            return ClusterNode(node)

        def query(node: str) -> NodeAnswer:
            agent = pods.get(node)
            has_agent = agent is not None and not agent.problem
            not_read = ""
            if agent is not None and has_agent and read and self.reader:
                try:
                    output = self.reader.get(agent, read.name, **read.query)
                except KubectlError as error:
                    not_read = str(error)
                else:
                    return NodeAnswer(node, output, is_ready=agent.is_ready)
            try:
                if agent is not None and has_agent:
                    pod = agent.name
                elif makers is not None and not fact(node).problem:
                    pod = makers.ensure(node)
                else:
                    problem = why_unreachable(agent, fact(node))
                    is_selected = fact(node).is_selected
                    return NodeAnswer(
                        node, problem=problem, has_agent=False, is_selected=is_selected
                    )
                output = self.run(
                    *("exec", *stdin, *self.place(pod), "--", *command),
                    content=content,
                    margin_seconds=0.0,
                )
            except KubectlError as error:
                is_ready = agent is not None and agent.is_ready
                if error.exit_status in answers_with and error.output.strip():
                    status = error.exit_status
                    return NodeAnswer(
                        node, error.output, "", status, is_ready=is_ready, has_agent=has_agent
                    )
                problem = _in_words(error, fact(node), command)
                if not_read and is_forbidden(error):
                    problem = f"it gives no answer to you: {not_read}; nor by exec: {problem}"
                return NodeAnswer(
                    node, problem=problem, exit_status=error.exit_status, has_agent=has_agent
                )
            is_ready = agent is not None and agent.is_ready
            return NodeAnswer(node, output, is_ready=is_ready, has_agent=has_agent)

        chosen = sorted(read_all() if nodes is None else nodes)
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(query, chosen))


def is_forbidden(error: KubectlError) -> bool:
    """Whether the user lacks a right."""
    return "(Forbidden)" in str(error)


def is_missing(error: KubectlError) -> bool:
    """Whether the object does not exist, or not any more."""
    return "(NotFound)" in str(error)


def why_unreachable(agent: AgentPod | None, node: ClusterNode) -> str:
    """Why no command can run in the agent's pod."""
    if node.problem:
        return node.problem
    if agent is not None:
        return agent.problem
    if node.is_selected:
        return "no agent runs on this node"
    return "no agent runs on this node, which the DaemonSet does not select"


def _in_words(error: KubectlError, node: ClusterNode, command: Sequence[str]) -> str:
    """Why a command in a node's pod failed, without its full stop."""
    text = str(error)
    if _UNKNOWN_COMMAND in text:
        return f"its agent is of a version without 'podgate {command[1]}'"
    is_cut_off = isinstance(error, NoResponseError)
    raw = _KUBECTL_ERROR.match(text)
    if node.problem and (is_cut_off or raw):
        return node.problem
    if is_cut_off:
        return text.partition(": ")[0]
    if raw and raw[3]:
        return f"its kubelet does not respond: {text[raw.end() :]}"
    return text


def last_line(text: str) -> str:
    """Of kubectl's errors, without a text that reports only that there was one."""
    lines = text.strip().splitlines()
    if len(lines) > 1 and _EXIT_TEXT.fullmatch(lines[-1]):
        lines.pop()
    return lines[-1] if lines else ""
