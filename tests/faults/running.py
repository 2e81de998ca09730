"""Runs one seed: the fault, the pods that come and go, and what must hold of both."""

import collections
import concurrent.futures
import dataclasses
import re
import time

from agent.admin.report import AgentReport
from agent.logs import Event
from tests.faults import injecting, plans
from tests.faults.node import Node
from tests.faults.plans import Fault, Plan
from tests.polling import PATIENCE

# What the issue of a fault is allowed: then all is as before.
_AFTER_SECONDS = 10.0 * PATIENCE
_NAMED_SECONDS = 10.0 * PATIENCE
_POLL_SECONDS = 0.1
_TAIL_LINES = 60
# The shortest time that a problem is about.
_HELD_SECONDS = 1.0
# What is not kept within its time; all else is kept by a machine that gives no time, too.
_OF_TIME = re.compile("heartbeat |no finding [^ ]+ within |not as before |.* lost: TimeoutError ")

_naming = concurrent.futures.ThreadPoolExecutor(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """problems: what did not hold, one sentence each; failed: calls that the fault let fail, by
    name; seconds: from the fault's end until all was as before; held_seconds: for how long the
    machine held a witness up meanwhile."""

    plan: Plan
    problems: list[str]
    failed: collections.Counter[str]
    seconds: float
    log: list[str]
    held_seconds: float = 0.0

    @property
    def is_conclusive(self) -> bool:
        """Whether what was not kept is the agent's: not if it is only that something took too
        long while a witness was held up as well."""
        is_held = self.held_seconds > _HELD_SECONDS
        return not (self.problems and is_held and all(map(_OF_TIME.match, self.problems)))

    def text(self) -> str:
        calls = ", ".join(f"{count} {name}" for name, count in sorted(self.failed.items()))
        return "\n".join(
            (
                str(self.plan),
                f"failed calls: {calls or 'none'}",
                f"the machine held a witness up for {self.held_seconds:.1f} s",
                *(f"  not kept: {problem}" for problem in self.problems),
                f"  again: make test-faults SEED={self.plan.seed}",
                *(f"    {line}" for line in self.log),
            )
        )


def run(node: Node, seed: int) -> Result:
    """Run a seed on a node that is as it should be."""
    plan = plans.draw(seed)
    fault = plan.fault
    lines = len(node.operator.log_lines())
    text_bytes = node.operator.log.stat().st_size
    pid = node.operator.pid
    node.probe_all()
    node.injector.failed()
    node.witness.take()
    problems = []
    with injecting.inject(node, fault):
        kind = injecting.NAMED.get((fault.kind, fault.detail))
        named = None if kind is None else _naming.submit(_unnamed, node, kind)
        _come_and_go(node, plan)
        problems += named.result() if named else []
        problems += _lost(node, fault)
    ended = time.monotonic()
    problems += _not_as_before(node)
    seconds = time.monotonic() - ended
    if fault.kind != "damage" and (node.operator.pid != pid or node.has_ended):
        problems.append("the agent has ended")
    problems += _lost(node, fault)
    problems += [f"the {name} made no attempt" for name, made in node.attempts.items() if not made]
    failing = {str(line["component"]) for line in _since(node, lines, Event.COMPONENT_FAILED)}
    problems += _unnamed_components(node, failing)
    failed = collections.Counter(node.injector.failed())
    held_seconds = node.witness.take()
    log = []
    if problems:
        with node.operator.log.open("rb") as file:
            file.seek(text_bytes)
            log = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return Result(plan, problems, failed, seconds, log, held_seconds)


def _come_and_go(node: Node, plan: Plan) -> None:
    """For the time of the fault."""
    began = time.monotonic()
    oldest = next((name for name in node.modes if name not in node.residents), "")
    steps = [(plan.comes_after, "come"), (plan.goes_after, "go"), (1.0, "")]
    for after, what in sorted(steps):
        time.sleep(max(0.0, began + after * plan.fault.seconds - time.monotonic()))
        if what == "come":
            node.add(plan.mode, is_bridged=plan.is_bridged)
        elif what == "go" and oldest:
            node.remove(oldest)


def _lost(node: Node, fault: Fault) -> list[str]:
    """Connects, probes and heartbeats since the previous call, and the agent."""
    problems = node.noted()
    # A probe that the relay proxies may be lost with the relay.
    if fault.kind != "relay" and (fault.rule is None or fault.rule.process == "agent"):
        problems += node.lost_in_strict
    if fault.kind == "damage":
        problems = [one for one in problems if not _is_restart(one)]
    return problems


def _is_restart(problem: str) -> bool:
    """What an agent that was killed costs."""
    return problem.startswith("heartbeat")


def _unnamed(node: Node, kind: str) -> list[str]:
    """Wait until a finding names the fault."""

    deadline = time.monotonic() + _NAMED_SECONDS
    while time.monotonic() < deadline:
        report = node.operator.report()
        if report and any(one.kind == kind for one in report.findings):
            return []
        time.sleep(_POLL_SECONDS)
    return [f"no finding {kind} within {_NAMED_SECONDS:.0f} s of the fault"]


def _not_as_before(node: Node) -> list[str]:
    deadline = time.monotonic() + _AFTER_SECONDS
    while True:
        report = node.operator.report()
        lack = node.lacks(report) if report else "the agent does not respond"
        if not lack:
            return []
        if time.monotonic() > deadline or node.has_ended:
            return [f"not as before after {_AFTER_SECONDS:.0f} s: {lack}"]
        time.sleep(_POLL_SECONDS)


def _since(node: Node, lines: int, event: Event) -> list[dict[str, object]]:
    return [line for line in node.operator.log_lines()[lines:] if line["event"] == event.key]


def _unnamed_components(node: Node, failing: set[str]) -> list[str]:
    """Components that have failed and that no finding names."""
    report: AgentReport | None = node.operator.report() if failing else None
    if report is None:
        return []
    text = " ".join(one.sentence for one in report.findings if one.kind == "component-failing")
    return [f"no finding names {name}, which failed" for name in failing if name not in text]
