"""`kubectl podgate off` and `on`: the ceiling of all modes, by a label, and each node's state."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Collection

from agent.operate.kubectl import node_status, printing
from agent.operate.kubectl.cluster import Cluster

LABEL = "podgate.io/max-mode"
OFF = "off"

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
        ("off", "Open all gates, of the whole cluster or one node.", run_off),
        ("on", "Undo 'off': modes by labels are in force again.", run_on),
    ):
        parser = commands.add_parser(word, help=text, description=text)
        parser.add_argument("--node", metavar="NAME", help="This node only.")
        parser.set_defaults(run=run)


def run_off(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 if a node is not off in time."""
    started = time.monotonic()
    label(cluster, arguments.node, OFF)
    problems = wait(cluster, _chosen(cluster, arguments), lambda state: state.is_off)
    return _report(problems, "off", started)


def run_on(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 if a node stays off, by another label or switch, or does not respond."""
    started = time.monotonic()
    label(cluster, arguments.node, None)
    problems = wait(cluster, _chosen(cluster, arguments), lambda state: state.ceiling != OFF)
    return _report(problems, "on", started)


def label(cluster: Cluster, node: str | None, value: str | None) -> None:
    """Set the ceiling of a node, or of the cluster, or remove it."""
    target = ("node", node) if node else ("namespace", cluster.namespace)
    word = f"{LABEL}-" if value is None else f"{LABEL}={value}"
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
                if is_done(state):
                    waiting.discard(answer.node)
                else:
                    problem = _describe(state)
            problems[answer.node] = problem
        if time.monotonic() >= deadline:
            break
        if waiting:
            time.sleep(_POLL_SECONDS)
    return problems


def read_state(report: str) -> NodeState:
    """From the output of `podgate status --output json`."""
    found = json.loads(report)
    return NodeState(
        found["maxMode"], found.get("maxModeFrom", ""), tuple(found.get("inForce", ()))
    )


def _chosen(cluster: Cluster, arguments: argparse.Namespace) -> Collection[str]:
    return [arguments.node] if arguments.node else cluster.nodes()


def _describe(state: NodeState) -> str:
    if state.ceiling == OFF and state.in_force:
        return f"off, but still in force: {', '.join(state.in_force)}"
    return f"at most {state.ceiling}, by {state.ceiling_from}"


def _report(problems: dict[str, str], word: str, started: float) -> int:
    rows = [("NODE", "STATE"), *((node, why or word) for node, why in sorted(problems.items()))]
    printing.table(rows)
    failed = sum(map(bool, problems.values()))
    done, seconds = len(problems) - failed, time.monotonic() - started
    printing.progress(f"{done} of {len(problems)} nodes {word} in {seconds:.1f} s.")
    if failed and word == "off":
        printing.progress("On each of the others run 'podgate off --node'; see docs/off.md.")
    return int(failed > 0)
