"""`kubectl podgate enforce NAMESPACE`: checks, sets the label, watches drops, takes the label back
if they are harmful, and confirms each pod's mode."""

import argparse
import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from agent.labels import LEFT_LABEL, MODE_LABEL
from agent.operate.kubectl import checks, outcome, printing
from agent.operate.kubectl.cluster import Cluster, KubectlError
from agent.operate.kubectl.drop_watch import DropWatch
from agent.operate.kubectl.outcome import Outcome

_POLL_SECONDS = 5.0
# A pod that starts meanwhile has its gate within seconds, also in a crowd.
_SETTLE_SECONDS = 60.0
_SECONDS = {"s": 1, "m": 60, "h": 3600}
# The API server may be away for as long as its restart takes.
_ATTEMPTS = 12
_TAKEN_BACK, _INTERRUPTED = 1, 130


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "enforce",
        help="Enforce a namespace, and take that back if it harms.",
        description="Check agents, coverage and policies, label the namespace, watch drops, and "
        "confirm that each pod is in the mode. If traffic of the kubelet, or of a source that a "
        "policy lists, is dropped meanwhile, the label is taken back; also on Ctrl-C.",
    )
    parser.add_argument("namespace", metavar="NAMESPACE")
    parser.add_argument("--mode", choices=("enforce", "strict"), default="enforce")
    parser.add_argument(
        "--watch",
        type=duration,
        default=300.0,
        metavar="TIME",
        help="How long to watch drops: 90s, 5m (default) or 1h.",
    )
    parser.add_argument("--yes", action="store_true", help="Continue in spite of failed checks.")
    parser.set_defaults(run=run)


def run(
    arguments: argparse.Namespace,
    cluster: Cluster,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """0 if the label stays, all nodes were watched and all pods are in their modes."""
    namespace, mode = arguments.namespace, arguments.mode
    labels = cluster.get("namespace", namespace)["metadata"].get("labels") or {}
    before = labels.get(MODE_LABEL)
    # A label that was left behind by a removal of podgate is not in force yet.
    left = labels.get(LEFT_LABEL)
    if before == mode and left is None:
        already = outcome.read(cluster, namespace, mode)
        printing.line(
            f"Namespace {namespace} is labelled {MODE_LABEL}={mode} already; its gates are in "
            f"force for {already.pods} pods."
        )
        return int(not _confirm(already))
    made = checks.check(cluster, namespace, mode)
    for note in made.notes:
        printing.line(f"note: {note}")
    for problem in made.problems:
        printing.line(f"problem: {problem}")
    if made.problems and not arguments.yes:
        printing.line(
            f"Nothing was changed. Solve these {len(made.problems)} problems ('kubectl podgate "
            f"suggest -n {namespace}' prints policies), or use --yes."
        )
        return 1
    step = _Step(cluster, namespace, mode, before, left)
    watch = DropWatch(cluster, namespace, made.nodes)
    with _signals_as_interrupt():
        try:
            step.take()
            printing.line(
                f"Namespace {namespace} is labelled {MODE_LABEL}={mode}. Watching drops for "
                f"{arguments.watch:.0f} s; Ctrl-C takes the label back."
            )
            harm = _watch(watch, clock() + arguments.watch, clock, sleep)
            found = None if harm else _settle(cluster, namespace, mode, clock, sleep)
        except KeyboardInterrupt:
            step.take_back("interrupted")
            return _INTERRUPTED
        except BaseException as error:
            step.take_back(f"the watch failed: {error}")
            raise
        if found is None:
            step.take_back("traffic was dropped that must not be")
            return _TAKEN_BACK
    for node, problem in watch.unwatched.items():
        printing.line(f"{node} was not watched to the end: {problem}.")
    is_confirmed = _confirm(found)
    printing.line(
        f"Namespace {namespace} stays in {mode}; its gates are in force for {found.pods} pods. "
        "Next: 'podgate drops' on its nodes and the metric podgate_gate_packets_total show what is "
        f"dropped; '{step.back}' goes back."
    )
    return int(bool(watch.unwatched) or not is_confirmed)


def _confirm(found: Outcome) -> bool:
    """Print which pods are not in the mode, or on nodes that did not answer; whether there are
    none."""
    for note in found.notes:
        printing.line(f"note: {note}")
    for problem in found.problems:
        printing.line(f"problem: {problem}")
    for node, problem in found.silent.items():
        printing.line(
            f"not confirmed on {node}: {found.unconfirmed.get(node, 0)} pods ({problem})."
        )
    return found.is_complete


class _Step:
    """The change of a namespace's label, and back."""

    def __init__(
        self, cluster: Cluster, namespace: str, mode: str, before: str | None, left: str | None
    ) -> None:
        """before, left: values of the labels of the mode and of what was left behind."""
        self._cluster = cluster
        self._namespace = namespace
        self._mode = mode
        self._previous = [f"{MODE_LABEL}-" if before is None else f"{MODE_LABEL}={before}"]
        self._confirmed = [] if left is None else [f"{LEFT_LABEL}-"]
        if left is not None:
            self._previous.append(f"{LEFT_LABEL}={left}")
        self.back = " ".join(["kubectl label namespace", namespace, *self._previous, "--overwrite"])
        """The command that restores what was."""

    def take(self) -> None:
        self._label(f"{MODE_LABEL}={self._mode}", *self._confirmed)

    def take_back(self, reason: str) -> None:
        """Restore the label, in several attempts; Ctrl-C does not stop that."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for attempt in range(_ATTEMPTS):
            try:
                self._label(*self._previous)
            except KubectlError as error:
                printing.line(f"The label is not taken back yet: {error}")
                if attempt + 1 < _ATTEMPTS:
                    time.sleep(_POLL_SECONDS)
            else:
                printing.line(
                    f"The label of namespace {self._namespace} was taken back ({reason}); its pods "
                    "are in their previous mode within a second."
                )
                return
        raise KubectlError(f"the label could NOT be taken back ({reason}); run: {self.back}")

    def _label(self, *labels: str) -> None:
        self._cluster.run("label", "namespace", self._namespace, *labels, "--overwrite")


def _watch(
    watch: DropWatch,
    deadline: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Whether there was a harmful drop. Prints each drop once."""
    shown: set[str] = set()
    while True:
        try:
            drops = watch.poll()
        except KubectlError as error:
            printing.line(f"Drops cannot be read, trying again: {error}")
            drops = []
        harmful = [drop for drop in drops if drop.harm]
        for drop in drops:
            if drop.text not in shown:
                shown.add(drop.text)
                printing.line(f"dropped: {drop.text}" + (f" ({drop.harm})" if drop.harm else ""))
        if harmful:
            return True
        if clock() >= deadline:
            return False
        sleep(_POLL_SECONDS)


def _settle(
    cluster: Cluster,
    namespace: str,
    mode: str,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Outcome:
    """The outcome once all pods are in their modes, or after a minute."""
    deadline = clock() + _SETTLE_SECONDS
    while True:
        found = outcome.read(cluster, namespace, mode)
        if found.is_complete or clock() >= deadline:
            return found
        sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    # SIGINT as well: a shell starts commands in the background with it ignored.
    handlers = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def duration(text: str) -> float:
    """Seconds, of an option such as 90s, 5m or 1h."""
    found = re.fullmatch(r"(\d{1,6})([smh]?)", text)
    if not found:
        raise argparse.ArgumentTypeError("a time such as 90s, 5m or 1h")
    return float(int(found[1]) * _SECONDS.get(found[2], 1))
