"""What opens while no agent runs, and when: the conditions of bpf/src/rules.h, evaluated for an
operator.

Declared ports: `may_be_kubelet`; all gates: `is_dead_man_expired`.
"""

import dataclasses
import datetime
from collections.abc import Sequence

from agent.operate.pinned.report import Exposure
from bpf.gate_config import GateConfig
from bpf.rules import SourceKind
from bpf.verdicts import Mode

DECLARED_PORTS = "declared-ports"
ALL = "all"


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What gates compare. Ages and limits in seconds; a limit of 0: never.

    heartbeat_age: None if there never was a heartbeat; is_identified: whether one cgroup is
    admitted as the kubelet's; is_followed: whether the kernel follows its restarts; knows_pods:
    whether processes of pods are distinguished; is_relay_up: then strict admits not even the
    kubelet.
    """

    heartbeat_age: float | None
    stale_after: float
    dead_man: float
    is_identified: bool
    is_followed: bool
    knows_pods: bool
    is_relay_up: bool


def exposures(facts: Facts, gates: Sequence[GateConfig], now: datetime.datetime) -> list[Exposure]:
    """What is open and what will be, the soonest first. now: the time of `facts`."""
    found = []
    enforced = [gate for gate in gates if gate.mode >= Mode.ENFORCE]
    declared = [gate for gate in enforced if has_declared_ports(gate, facts)]
    if declared and (exposure := _declared_ports(facts, len(declared), now)):
        found.append(exposure)
    if enforced and facts.heartbeat_age is not None and facts.dead_man:
        found.append(_all(facts, facts.heartbeat_age, len(enforced), now))
    return sorted(found, key=lambda exposure: exposure.at or now)


def has_declared_ports(gate: GateConfig, facts: Facts) -> bool:
    """Whether this gate drops, and admits the kubelet to any port."""
    if gate.mode < Mode.ENFORCE:
        return False
    if gate.mode is Mode.STRICT and (gate.without_fallback or facts.is_relay_up):
        return False
    return any(rule.source is SourceKind.KUBELET for rule in gate.rules)


def _declared_ports(facts: Facts, pods: int, now: datetime.datetime) -> Exposure | None:
    to = "host processes outside pods" if facts.knows_pods else "all host and pod processes"
    ports = f"declared ports of {_pods(pods)}"
    if not facts.is_identified:
        return Exposure(
            what=DECLARED_PORTS,
            pods=pods,
            is_open=True,
            at=None,
            text=f"{_capitalised(ports)} are open to {to}: the kubelet is not identified.",
        )
    if facts.is_followed or facts.heartbeat_age is None or not facts.stale_after:
        return None
    left = facts.stale_after - facts.heartbeat_age
    reason = "the kernel does not follow the kubelet's restarts"
    if left <= 0:
        text = (
            f"{_capitalised(ports)} are open to {to}: no heartbeat for "
            f"{in_words(facts.heartbeat_age)}, and {reason}."
        )
    else:
        text = (
            f"{_capitalised(ports)} open to {to} in {in_words(left)} unless an agent starts: "
            f"{reason}."
        )
    return Exposure(
        what=DECLARED_PORTS, pods=pods, is_open=left <= 0, at=_after(now, left), text=text
    )


def _all(facts: Facts, age: float, pods: int, now: datetime.datetime) -> Exposure:
    left = facts.dead_man - age
    if left < 0:
        text = (
            f"All gates are open: no heartbeat for {in_words(age)}, and --dead-man-hours is "
            f"{facts.dead_man / 3600:g}."
        )
    else:
        text = f"All gates open in {in_words(left)} unless an agent starts (--dead-man-hours)."
    return Exposure(what=ALL, pods=pods, is_open=left < 0, at=_after(now, left), text=text)


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


def _pods(number: int) -> str:
    return "1 pod" if number == 1 else f"{number} pods"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
