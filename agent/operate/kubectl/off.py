"""`kubectl podgate off` and `on`: the ceiling of all modes, by a label, and each node's state."""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection

from agent.labels import MAX_MODE_LABEL
from agent.operate.kubectl import node_status, printing
from agent.operate.kubectl.cluster import Cluster, KubectlError
from agent.operate.kubectl.debug_pods import DebugPods

OFF = "off"

_DESCRIPTION = (
    "On a node whose agent does not follow, 'podgate {word} --node' runs as well, in the agent's "
    "container or in a pod that is made for that."
)
# How often nodes that are not done are queried; each is a process of kubectl.
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class NodeState:
    """A node's ceiling, what sets it, and what is in force there, as its agent reports it."""

    ceiling: str
    ceiling_from: str
    in_force: tuple[str, ...]

    @property
    def is_off(self) -> bool:
        return self.ceiling == OFF and not self.in_force


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for word, text, run in (
        ("off", "Open all gates, of the whole cluster or some nodes.", run_off),
        ("on", "Undo 'off': modes by labels are in force again.", run_on),
    ):
        parser = commands.add_parser(
            word, help=text, description=f"{text} {_DESCRIPTION.format(word=word)}"
        )
        parser.add_argument("nodes", nargs="*", metavar="NODE", help="These nodes only.")
        parser.add_argument("--node", action="append", default=[], metavar="NAME", help="As NODE.")
        parser.set_defaults(run=run)


def run_off(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 if a node is not off in time. Where no agent follows the label, 'podgate off --node' runs
    on the node, if need be in a pod that is made for it."""
    started = time.monotonic()
    chosen = _named(arguments)
    unlabelled = _label_all(cluster, chosen, OFF)
    nodes = [node for node in chosen or cluster.nodes() if node not in unlabelled]
    problems = wait(cluster, nodes, lambda state: state.is_off) | unlabelled
    late = [node for node, problem in problems.items() if problem]
    done = switch(cluster, late, "off")
    problems.update(dict.fromkeys((node for node, why in done.items() if not why), ""))
    return _report(problems, "off", started, by_command=[n for n in late if not problems[n]])


def run_on(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 if a node stays off, by another label or switch, or does not respond."""
    started = time.monotonic()
    chosen = _named(arguments)
    unlabelled = _label_all(cluster, chosen, None)
    named = [node for node in chosen if node not in unlabelled]
    failed = {node: why for node, why in switch(cluster, named, "on").items() if why}
    nodes = named if chosen else cluster.nodes()
    problems = wait(cluster, nodes, lambda state: state.ceiling != OFF) | unlabelled
    problems |= {node: problems[node] or why for node, why in failed.items()}
    return _report(problems, "on", started)


def switch(cluster: Cluster, nodes: Collection[str], word: str) -> dict[str, str]:
    """Run 'podgate off --node' or 'podgate on --node' on these nodes. By node: why that failed, or
    an empty string."""
    if not nodes:
        return {}
    command = ("podgate", word, "--node", "--timeout=0")
    with contextlib.closing(DebugPods(cluster)) as debug_pods:
        answers = cluster.query_nodes(*command, nodes=nodes, debug_pods=debug_pods)
    return {answer.node: answer.problem for answer in answers}


def _label_all(cluster: Cluster, nodes: Collection[str], value: str | None) -> dict[str, str]:
    """The ceiling of these nodes, or of the cluster if there are none. By node: why it could not be
    labelled, as one that was deleted; raises `KubectlError` if none could."""
    if not nodes:
        label(cluster, None, value)
    problems: dict[str, str] = {}
    for node in nodes:
        try:
            label(cluster, node, value)
        except KubectlError as error:
            if len(problems) + 1 == len(nodes):
                raise
            problems[node] = f"its Node cannot be labelled: {str(error).rstrip('.')}"
    return problems


def label(cluster: Cluster, node: str | None, value: str | None) -> None:
    """Set the ceiling of a node, or of the cluster, or remove it."""
    target = ("node", node) if node else ("namespace", cluster.namespace)
    word = f"{MAX_MODE_LABEL}-" if value is None else f"{MAX_MODE_LABEL}={value}"
    cluster.run("label", *target, word, "--overwrite")


def wait(
    cluster: Cluster, nodes: Collection[str], is_done: Callable[[NodeState], bool]
) -> dict[str, str]:
    """Query these nodes until all are done, or the time is over. By node: why it is not, or ""."""
    deadline = time.monotonic() + cluster.timeout_seconds
    problems = dict.fromkeys(nodes, "")
    waiting = set(nodes)
    while waiting:
        for answer in node_status.query(cluster, waiting):
            problem = answer.problem
            if not problem:
                state = read_state(answer.output)
                if state is None:
                    problem = "its agent's answer is not readable; is it another version?"
                elif is_done(state):
                    waiting.discard(answer.node)
                else:
                    problem = _describe(state, answer.node)
            elif not answer.has_agent:
                waiting.discard(answer.node)
            problems[answer.node] = problem
        if time.monotonic() >= deadline:
            break
        if waiting:
            time.sleep(_POLL_SECONDS)
    return problems


def read_state(report: str) -> NodeState | None:
    """From the output of `podgate status --output json`; None if that lacks the ceiling."""
    found = node_status.decode(report) or {}
    ceiling, of, in_force = (found.get(key) for key in ("maxMode", "maxModeFrom", "inForce"))
    if not isinstance(ceiling, str):
        return None
    parts = in_force if isinstance(in_force, list) else ()
    return NodeState(ceiling, of if isinstance(of, str) else "", tuple(map(str, parts)))


def _named(arguments: argparse.Namespace) -> list[str]:
    return sorted({*arguments.nodes, *arguments.node})


def _describe(state: NodeState, node: str) -> str:
    if state.ceiling == OFF and state.in_force:
        return f"off, but still in force: {', '.join(state.in_force)}"
    is_of_node = state.ceiling == OFF and "node" in state.ceiling_from
    undo = f"; undo it with 'kubectl podgate on {node}'" if is_of_node else ""
    return f"at most {state.ceiling}, by {state.ceiling_from}{undo}"


def _report(
    problems: dict[str, str], word: str, started: float, by_command: Collection[str] = ()
) -> int:
    """by_command: nodes that are off by 'podgate off --node'."""
    states = dict.fromkeys(by_command, f"{word}, by 'podgate off --node'")
    rows = [
        ("NODE", "STATE"),
        *((node, why or states.get(node, word)) for node, why in sorted(problems.items())),
    ]
    printing.table(rows)
    failed = sum(map(bool, problems.values()))
    done, seconds = len(problems) - failed, time.monotonic() - started
    printing.progress(f"{done} of {len(problems)} nodes {word} in {seconds:.1f} s.")
    if failed and word == "off":
        printing.progress("On each of the others run 'podgate off --node'; see docs/off.md.")
    if by_command:
        names = " ".join(sorted(by_command))
        printing.progress(f"No agent follows there; back later with: kubectl podgate on {names}")
    return int(failed > 0)
