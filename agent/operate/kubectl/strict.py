"""`kubectl podgate strict NAMESPACE`: compares podgate's results of probes with the kubelet's,
lists pods that mode strict would harm or leave at enforce, and sets the mode as `enforce` does."""

import argparse
import json
import time
from collections.abc import Callable, Iterable

from agent.labels import MODE_LABEL
from agent.operate.kubectl import enforce, node_status, printing
from agent.operate.kubectl.cluster import Cluster, Object
from agent.operate.kubectl.comparison import Comparison, Effects

_POLL_SECONDS = 10.0
_STOPPED = 1

_HEADINGS = (
    ("restarts", "would be restarted"),
    ("unready", "would not be Ready"),
    ("at_enforce", "would stay at enforce"),
    ("unknown", "cannot be compared"),
)


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "strict",
        help="Compare probes before strict, then set it, and take that back if it harms.",
        description="Compare podgate's results of all probes with the kubelet's for a time, and "
        "list pods that mode strict would restart, make unready or leave at enforce. If there are "
        "none, or with --yes, continue as 'kubectl podgate enforce --mode strict'.",
    )
    parser.add_argument("namespace", metavar="NAMESPACE")
    parser.add_argument(
        "--compare",
        type=enforce.duration,
        default=60.0,
        metavar="TIME",
        help="How long to compare results: 30s, 1m (default) or 1h.",
    )
    parser.add_argument(
        "--watch",
        type=enforce.duration,
        default=300.0,
        metavar="TIME",
        help="How long to watch drops after that: 90s, 5m (default) or 1h.",
    )
    parser.add_argument(
        "--yes", action="store_true", help="Continue in spite of these pods and of failed checks."
    )
    parser.set_defaults(run=run)


def run(
    arguments: argparse.Namespace,
    cluster: Cluster,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """1 if nothing was changed because of what strict would harm; else as `enforce.run`."""
    namespace = arguments.namespace
    labels = cluster.get("namespace", namespace)["metadata"].get("labels") or {}
    if labels.get(MODE_LABEL) != "strict":
        printing.line(
            f"Comparing podgate's results of the probes in namespace {namespace} with the "
            f"kubelet's for {arguments.compare:.0f} s."
        )
        effects, problems = _compare(cluster, namespace, arguments.compare, clock, sleep)
        _print(effects, problems)
        if not arguments.yes and (problems or not effects.is_harmless):
            printing.line(
                "Nothing was changed. Correct these probes or pods, or use --yes; until then "
                f"'kubectl podgate enforce {namespace}' closes the pods without a change of probes."
            )
            return _STOPPED
    step = argparse.Namespace(
        namespace=namespace, mode="strict", watch=arguments.watch, yes=arguments.yes
    )
    return enforce.run(step, cluster, clock=clock, sleep=sleep)


def _compare(
    cluster: Cluster,
    namespace: str,
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> tuple[Effects, list[str]]:
    """What the samples show together, and nodes that did not answer in the last one."""
    comparison = Comparison()
    deadline = clock() + seconds
    while True:
        answers = node_status.query(cluster)
        reports = [json.loads(answer.output) for answer in answers if not answer.problem]
        comparison.add(
            list(_pods_of(namespace, reports)), cluster.items("pods", f"--namespace={namespace}")
        )
        left = deadline - clock()
        if left <= 0:
            problems = [f"{one.node}: {one.problem}." for one in answers if one.problem]
            return comparison.effects(), problems
        sleep(min(left, _POLL_SECONDS))


def _pods_of(namespace: str, reports: Iterable[Object]) -> Iterable[Object]:
    for report in reports:
        yield from (pod for pod in report.get("pods") or () if pod.get("namespace") == namespace)


def _print(effects: Effects, problems: list[str]) -> None:
    for name, heading in _HEADINGS:
        for sentence in getattr(effects, name):
            printing.line(f"{heading}: {sentence}")
    for problem in problems:
        printing.line(f"problem: {problem}")
    if effects.is_harmless and not problems:
        printing.line(f"All {effects.compared} probes have the same result from inside.")
