"""`kubectl podgate drops --follow`: drop events of all nodes as they happen."""

import contextlib
import dataclasses
import json
import queue
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence

from agent.operate import flow_text
from agent.operate.kubectl import node_status, output, printing
from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import (
    Cluster,
    KubectlError,
    Object,
    last_line,
    why_unreachable,
)
from agent.operate.kubectl.exit_status import NO_AGENT
from agent.operate.text import printable

# A process in a container does not end with the kubectl that started it, unless it follows its
# standard input.
_COMMAND = ("podgate", "drops", "--follow", "--output=json", "--end-with-input")
# Each is a process of kubectl of 40 MB, and one connection of the API server.
_MAX_STREAMS = 64
# An agent that is replaced is away for seconds; a node that is down costs one process each time.
_RETRY_SECONDS = 5.0
_END_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class NodeLine:
    """A line of a node's stream, or its end with the reason in `problem`."""

    node: str
    text: str = ""
    problem: str | None = None


def run(
    cluster: Cluster,
    nodes: Sequence[str] | None,
    is_selected: Callable[[Object], bool],
    *,
    form: str,
) -> int:
    """Print the selected events of these nodes, or of all, until interrupted."""
    agents = [one for one in cluster.agents() if nodes is None or one.node in nodes]
    chosen = sorted(nodes) if nodes else [one.node for one in agents]
    if len(chosen) > _MAX_STREAMS:
        raise KubectlError(
            f"{len(chosen)} nodes are too many to follow at once (at most {_MAX_STREAMS}); choose "
            "some with --node"
        )
    if not agents:
        printing.progress("kubectl podgate: no agent responds; see 'kubectl podgate status'")
        return NO_AGENT
    for node in cluster.all_nodes() if nodes is None else ():
        if node.name not in chosen:
            printing.progress(f"{node.name}: {why_unreachable(None, node)}")
    width = max(map(len, chosen))
    with contextlib.closing(lines(cluster, chosen)) as stream:
        for line in stream:
            event = node_status.decode(line.text)
            if line.problem is not None:
                printing.progress(f"{line.node}: {line.problem}")
            elif event is not None and "suppressed" in event:
                # Of any pods: the node does not know which.
                text = f"{_moment(event)}  {flow_text.suppressed_text(event['suppressed'])}"
                _show(line.node.ljust(width), event, text, form)
            elif event is None:
                printing.progress(f"{line.node}: {line.text}")
            elif is_selected(event):
                _show(line.node.ljust(width), event, describe(event), form)
    return 0


def _show(node: str, document: Object, text: str, form: str) -> None:
    if form == output.JSON:
        printing.line(json.dumps({"node": node.rstrip(), **document}, ensure_ascii=False))
    else:
        printing.line(f"{node}  {printable(text)}")


def lines(
    cluster: Cluster, nodes: Sequence[str], *, retry_seconds: float = _RETRY_SECONDS
) -> Generator[NodeLine, None, None]:
    """Lines of all nodes' streams, in the order of their arrival.

    A stream that ends is started again in the node's agent of that time. Closing the generator
    ends all processes.
    """
    found: queue.SimpleQueue[NodeLine] = queue.SimpleQueue()
    is_closed = threading.Event()
    streams = [_Stream(cluster, node, found.put, is_closed, retry_seconds) for node in nodes]
    try:
        for stream in streams:
            stream.start()
        while True:
            yield found.get()
    finally:
        is_closed.set()
        for stream in streams:
            stream.close_input()
        for stream in streams:
            stream.end()


class _Stream:
    """One node's, in a thread of its own."""

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        report: Callable[[NodeLine], None],
        is_closed: threading.Event,
        retry_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._node = node
        self._report = report
        self._is_closed = is_closed
        self._retry_seconds = retry_seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"drops of {node}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close_input(self) -> None:
        """The command in the pod ends by that, and kubectl with it."""
        with self._lock:
            process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def end(self) -> None:
        """Wait for that, for a limited time."""
        self._thread.join(_END_SECONDS)
        with self._lock:
            process = self._process
        if self._thread.is_alive() and process is not None:
            process.kill()
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        shown = ""
        while not self._is_closed.is_set():
            try:
                problem = self._follow(self._agent())
            except KubectlError as error:
                problem = str(error)
            # One line for an outage, however often it is tried.
            if problem != shown and not self._is_closed.is_set():
                self._report(NodeLine(self._node, problem=f"{problem}; trying again"))
            shown = problem
            self._is_closed.wait(self._retry_seconds)

    def _agent(self) -> AgentPod:
        for agent in self._cluster.agents():
            if agent.node == self._node:
                if agent.problem:
                    raise KubectlError(agent.problem)
                return agent
        raise KubectlError("no agent runs on this node")

    def _follow(self, agent: AgentPod) -> str:
        """Report lines until the stream ends; the reason, as its last line that is no event."""
        place = self._cluster.place(agent.name)
        with self._lock:
            if self._is_closed.is_set():
                return ""
            self._process = process = self._cluster.open("exec", "--stdin", *place, "--", *_COMMAND)
        assert process.stdout is not None
        other: list[str] = []
        with process:
            for text in process.stdout:
                if text.startswith("{"):
                    self._report(NodeLine(self._node, text))
                else:
                    other = [*other[-1:], text]
        return last_line("".join(other)) or "the stream has ended"


def describe(event: Object) -> str:
    """One drop event in words."""

    def text(key: str) -> str:
        value = event.get(key)
        return str(value) if value else ""

    process = f"{text('processName')} ({text('process')})" if text("process") else ""
    place = text("sourcePod") or text("cgroup")
    where = flow_text.source_text(text("cgroup"), text("sourcePod")) if place else ""
    source = " in ".join(filter(None, (process, where))) or text("sourceAddress")
    pod = "/".join(filter(None, (text("namespace"), text("pod"))))
    target = pod or text("destinationAddress")
    port = " ".join(filter(None, (text("protocol"), text("destinationPort"))))
    return (
        f"{_moment(event)}  {text('verdict')} {text('reason')}: {source} -> {target} {port}".strip()
    )


def _moment(event: Object) -> str:
    """The time of day, in milliseconds."""
    return str(event.get("at") or "").partition("T")[2].rstrip("Z")[:12]
