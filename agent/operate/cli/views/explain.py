"""Output of `podgate explain`."""

from agent.listing import full_name
from agent.operate.cli.output import Column, Screen, Signal, signal_of_severity
from agent.operate.explain import model
from agent.operate.explain.model import (
    Change,
    Check,
    EgressAnswer,
    Explanation,
    NearMiss,
    PodExplanation,
    RuleAnswer,
    Step,
)

_VERDICTS = {
    model.PASS: Signal.SAFE,
    model.DROP: Signal.DANGER,
    model.WOULD_DROP: Signal.CAUTION,
}
_STATES = {"ok": Signal.SAFE, "problem": Signal.DANGER, "unknown": Signal.CAUTION}

_STEPS: tuple[Column[Step], ...] = (
    Column("STEP", lambda step: step.name),
    Column("ANSWER", lambda step: ("-> " if step.is_deciding else "") + step.answer),
    Column("SOURCE", lambda step: step.source, is_wide=True),
)
_RULES: tuple[Column[RuleAnswer], ...] = (
    Column("RULE ADMITS", lambda rule: rule.source),
    Column("TO", lambda rule: rule.protocol + ("" if rule.ports == "any" else f" {rule.ports}")),
    Column("POLICY", lambda rule: rule.policy),
    Column("MATCHES", lambda rule: f"no: {rule.mismatch}" if rule.mismatch else "yes"),
)
_EGRESS: tuple[Column[EgressAnswer], ...] = (
    Column("RULE DENIES", lambda rule: rule.destination),
    Column("EGRESS POLICY", lambda rule: rule.policy),
    Column("ACTION", lambda rule: rule.action),
    Column("MATCHES", lambda rule: f"no: {rule.mismatch}" if rule.mismatch else "yes"),
)
_NEAR_MISSES: tuple[Column[NearMiss], ...] = (
    Column("ALMOST ADMITS", lambda miss: miss.policy),
    Column("WHY NOT", lambda miss: miss.text),
)


def _signal(check: Check) -> Signal | None:
    return signal_of_severity(check.severity) if check.severity else _STATES[check.state]


_CHECKS: tuple[Column[Check], ...] = (
    Column("CHECK", lambda check: check.name),
    Column("STATE", lambda check: check.severity or check.state, signal=_signal),
    Column("WHAT", lambda check: check.text),
    Column(
        "NEXT",
        lambda check: "; ".join(filter(None, (check.remedy.rstrip("."), check.next))),
        is_below=True,
    ),
)


def show_flow(screen: Screen, found: Explanation) -> None:
    """Print the verdict, then how it comes about, then what would change it."""
    target = found.target
    pod = full_name(target.namespace, target.pod) if target.pod else ""
    to = f"{pod} ({target.address})" if pod else target.address
    port = f" port {target.port}" if target.port else ""
    screen.line(
        f"{found.verdict.upper()}: {found.source.text} to {to}, {target.protocol}{port}",
        _VERDICTS[found.verdict],
    )
    reason = f", reason {found.reason}" if found.reason else ""
    screen.line(f"Decided by: {model.DECIDERS[found.decided_by]}{reason}. {_capital(found.text)}.")
    screen.line()
    screen.table(_STEPS, found.steps)
    if found.egress_rules:
        screen.line()
        screen.table(_EGRESS, found.egress_rules)
    if found.rules:
        screen.line()
        screen.table(_RULES, found.rules)
    if found.near_misses:
        screen.line()
        screen.table(_NEAR_MISSES, found.near_misses)
    screen.line()
    age = found.agent.heartbeat_age_seconds
    heartbeat = "no heartbeat yet" if age is None else f"last heartbeat {age:.0f} s ago"
    screen.line(
        f"Agent {found.agent.state}, {heartbeat}: {found.agent.consequence}.",
        None if found.agent.state == "alive" else Signal.CAUTION,
    )
    if found.confirmation == model.SAME:
        screen.line("The gate's program, run on the same facts, has the same verdict.")
    elif found.confirmation:
        screen.line(f"The gate's program as a check: {found.confirmation}.", Signal.CAUTION)
    for note in found.notes:
        screen.line(note)
    for change in found.changes:
        _show_change(screen, change)


def show_pod(screen: Screen, found: PodExplanation) -> None:
    """Print all checks; the first problem is usually the cause of those after it."""
    name = full_name(found.namespace, found.name)
    verdict = "all is well" if found.is_well else "not all is well"
    screen.line(f"{name}: {verdict}", Signal.SAFE if found.is_well else Signal.DANGER)
    if not found.from_agent:
        screen.line("No agent responds: read from the pins and the saved state.", Signal.CAUTION)
    screen.line()
    screen.table(_CHECKS, found.checks)


def _show_change(screen: Screen, change: Change) -> None:
    screen.line()
    screen.line(f"To change it: {change.text}")
    for line in (change.command or change.policy).splitlines():
        screen.line(f"  {line}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
