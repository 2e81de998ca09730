"""What opens while no agent runs, and when, in sentences for an operator."""

import datetime
from collections.abc import Sequence

from agent.operate.pinned.report import Exposure
from bpf.gate_config import GateConfig
from bpf.rule_evaluation import NodeFacts
from bpf.rules import SourceKind
from bpf.verdicts import Mode

DECLARED_PORTS = "declared-ports"
ALL = "all"


def exposures(
    node: NodeFacts,
    gates: Sequence[GateConfig],
    *,
    is_relay_up: bool,
    now_ns: int,
    now: datetime.datetime,
) -> list[Exposure]:
    """What is open and what will be, the soonest first.

    is_relay_up: then strict admits not even the kubelet; now_ns: `now`, of CLOCK_MONOTONIC.
    """
    found = []
    enforced = [gate for gate in gates if gate.mode >= Mode.ENFORCE]
    declared = sum(_has_declared_ports(gate, is_relay_up=is_relay_up) for gate in enforced)
    if declared and (exposure := _declared_ports(node, declared, now_ns, now)):
        found.append(exposure)
    if enforced and (exposure := _all(node, len(enforced), now_ns, now)):
        found.append(exposure)
    return sorted(found, key=lambda exposure: exposure.at or now)


def _has_declared_ports(gate: GateConfig, *, is_relay_up: bool) -> bool:
    """Whether an enforcing gate admits the kubelet to any port."""
    if gate.mode is Mode.STRICT and (gate.without_fallback or is_relay_up):
        return False
    return any(rule.source is SourceKind.KUBELET for rule in gate.rules)


def _declared_ports(
    node: NodeFacts, pods: int, now_ns: int, now: datetime.datetime
) -> Exposure | None:
    ports = f"Declared ports of {pods} pod{'s' if pods > 1 else ''}"
    to = "host processes outside pods" if node.pods_cgroup else "all host and pod processes"
    is_open, at = node.is_kubelet_unsure(now_ns), None
    age_ns = node.heartbeat_age_ns(now_ns)
    reason = "the kernel does not follow the kubelet's restarts"
    if not node.kubelet_cgroups:
        text = f"{ports} are open to {to}: the kubelet is not identified."
    elif node.is_unit_followed or age_ns is None or not node.stale_after_ns:
        return None
    else:
        left = (node.stale_after_ns - age_ns) / 1e9
        at = _after(now, left)
        text = f"{ports} open to {to} in {in_words(left)} unless an agent starts: {reason}."
        if is_open:
            age = in_words(age_ns / 1e9)
            text = f"{ports} are open to {to}: no heartbeat for {age}, and {reason}."
    return Exposure(what=DECLARED_PORTS, pods=pods, is_open=is_open, at=at, text=text)


def _all(node: NodeFacts, pods: int, now_ns: int, now: datetime.datetime) -> Exposure | None:
    age_ns = node.heartbeat_age_ns(now_ns)
    if age_ns is None or not node.dead_man_ns:
        return None
    is_open = node.is_dead_man_expired(now_ns)
    left = (node.dead_man_ns - age_ns) / 1e9
    text = f"All gates open in {in_words(left)} unless an agent starts (--dead-man-hours)."
    if is_open:
        hours = f"{node.dead_man_ns / 3600e9:g}"
        age = in_words(age_ns / 1e9)
        text = f"All gates are open: no heartbeat for {age}, and --dead-man-hours is {hours}."
    return Exposure(what=ALL, pods=pods, is_open=is_open, at=_after(now, left), text=text)


def in_words(seconds: float) -> str:
    """As "23 h 12 min", "4 min 5 s" or "40 s"."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole} s"


def _after(now: datetime.datetime, seconds: float) -> datetime.datetime:
    return now + datetime.timedelta(seconds=seconds)
