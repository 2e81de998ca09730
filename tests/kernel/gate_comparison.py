"""Compares the gate's program with its specification (tests/model/gate.py) on made frames.

`compare` runs many; its seed makes the same states and frames again.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.verdicts import Reason, Verdict
from tests.kernel.gate_runs import Found, GateRuns
from tests.kernel.gate_sockets import Unsendable
from tests.model import flows, gate, generator
from tests.model.facts import Gate, Kind, Sent, Stamp, State
from tests.model.generator import Generator, Way

_FRAMES_OF_A_STATE = 250
_POD_FRAMES = 12
_FRAGMENTS_END_NS = 71 * 10**9
_PATIENCE = 4
_STATE_SECONDS = 1.0
"""Longer than a state takes, unless the machine is very busy; so that no age comes near a limit."""
_AGES_NS = tuple(seconds * 10**9 for seconds in (4, 19, 37, 71, 131))
"""No one or two of them are near a lifetime: the program reads a clock of ticks."""

_OF_OTHERS = {Reason.TUNNEL, Reason.EVASION, Reason.RELAY, Reason.HOST_EGRESS}
"""Hooks, the tunnel guard and the relay's interface give these."""
REACHABLE = frozenset(Reason) - _OF_OTHERS
KINDS = frozenset(Kind) - {Kind.REQUEST, Kind.UDPLITE}
"""No way leads to the former, and not every kernel has the latter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Disagreement:
    """state: its number in the run."""

    state: int
    way: Way
    sent: Sent
    specified: Found
    found: Found
    of: State

    def __str__(self) -> str:
        gate = self.of.gate
        return (
            f"state {self.state}, {self.way.name}: specified {_text(self.specified)}, "
            f"found {_text(self.found)}\n  {self.sent.frame.hex()}\n"
            f"  {_changed(self.sent, 'frame')}\n"
            f"  {_changed(gate, 'rules', 'addresses') if gate else 'no gate'}, "
            f"{_changed(self.of.node)}"
        )


def _text(found: Found) -> str:
    counted = " ".join(each.label for each in found.verdict) if found.verdict else "not counted"
    passed = "dropped" if found.is_dropped else "passed"
    return f"{counted} ({passed}, stamp {found.stamp.name if found.stamp else 'unknown'})"


def _changed(record: Sent | Gate | NodeFacts, *without: str) -> str:
    """The fields that do not have their defaults."""
    changed = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if field.name not in without and getattr(record, field.name) != field.default
    }
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())


@dataclasses.dataclass(slots=True)
class Report:
    """found: verdicts and reasons by how often they were given; unsendable: frames that the kernel
    did not take."""

    seed: str
    frames: int = 0
    unsendable: int = 0
    seconds: float = 0
    found: Counter[tuple[Verdict, Reason] | None] = dataclasses.field(default_factory=Counter)
    ways: Counter[str] = dataclasses.field(default_factory=Counter)
    disagreements: list[Disagreement] = dataclasses.field(default_factory=list)

    @property
    def missing(self) -> set[str]:
        """Reasons that no frame was given, and kinds of sockets by which none was sent."""
        reasons = set(REACHABLE) - {found[1] for found in self.found if found}
        ways = {f"by {kind.name}" for kind in KINDS} - self.ways.keys()
        return {reason.label for reason in reasons} | ways

    def __str__(self) -> str:
        rate = self.frames / self.seconds if self.seconds else 0
        reasons: Counter[str] = Counter()
        for found, count in self.found.items():
            reasons[f"{found[0].label} {found[1].label}" if found else "not counted"] += count
        lines = [
            f"seed {self.seed}: {self.frames} frames, {self.unsendable} more not sent, "
            f"{self.seconds:.1f} s, {rate:.0f}/s, {len(self.disagreements)} disagreements",
            "  " + ", ".join(f"{way} {count}" for way, count in self.ways.most_common()),
            "  " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()),
        ]
        if self.missing:
            lines.append("  never: " + ", ".join(sorted(self.missing)))
        return "\n".join(lines)


def compare(
    runs: GateRuns,
    cgroup: Cgroup,
    seed: str,
    frames: int,
    *,
    limit: int = 20,
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Run `frames` of them, up to four times as many while a reason is missing; or until `limit`
    disagreements are found."""
    made = Generator(seed, cgroup, runs.sockets)
    report = Report(seed)
    began = time.monotonic()
    number = 0
    while len(report.disagreements) < limit:
        if report.frames >= (_PATIENCE * frames if report.missing else frames):
            break
        _one_state(runs, made, report, number)
        number += 1
        report.seconds = time.monotonic() - began
        if progress:
            progress(report)
    return report


def _one_state(runs: GateRuns, made: Generator, report: Report, number: int) -> None:
    ends = time.monotonic() + _STATE_SECONDS
    state = made.state(time.monotonic_ns())
    runs.apply(state)
    questions = _questions(runs, made, state)
    for count in range(_FRAMES_OF_A_STATE):
        if count == _FRAMES_OF_A_STATE // 2 and made.below(3) == 0:
            age(runs, state, _FRAGMENTS_END_NS)
        way, sent = made.sent(made.frame(questions))
        now_ns = time.monotonic_ns()
        try:
            found = runs.run(way, sent)
        except Unsendable:
            report.unsendable += 1
            continue
        if time.monotonic() > ends:
            return
        specified = specify(way, sent, state, now_ns)
        report.frames += 1
        report.ways[f"by {sent.socket.kind.name}" if sent.socket else way.name] += 1
        report.found[found.verdict] += 1
        made.learn(sent.frame, found.verdict)
        if found != specified:
            report.disagreements.append(Disagreement(number, way, sent, specified, found, state))


def _questions(runs: GateRuns, made: Generator, state: State) -> list[bytes]:
    """Frames of the pod, of which it has sent some a while ago."""
    questions = []
    for _ in range(made.below(3)):
        for _ in range(made.below(_POD_FRAMES)):
            frame, is_broadcast = made.pod_frame()
            stamp = made.stamp()
            try:
                left = runs.record(frame, stamp)
            except Unsendable:
                continue
            expected = gate.stamp_from_pod(stamp) if state.node.has_ovs else Stamp.NONE
            assert left is expected, (stamp, left, frame.hex())
            flows.record(frame, state, time.monotonic_ns(), is_broadcast=is_broadcast)
            questions.append(frame)
        age(runs, state, made.one_of(_AGES_NS))
    return questions


def age(runs: GateRuns, state: State, by_ns: int) -> None:
    runs.age(by_ns)
    for seen in state.flows.values():
        seen.at_ns -= by_ns
    for key in state.fragments:
        state.fragments[key] -= by_ns


def specify(way: Way, sent: Sent, state: State, now_ns: int) -> Found:
    """What `GateRuns.run` finds by the specification. now_ns: CLOCK_MONOTONIC."""
    answer = gate.evaluate(sent, state, now_ns)
    is_dropped = answer.is_dropped
    stamp: Stamp | None = None
    if not is_dropped and way.name != generator.RUN:
        stamp = answer.stamp
    return Found(answer.counted, is_dropped, stamp)
