"""Messages from the stage to the supervisor: one JSON object per line."""

import sys

import msgspec


class Step(msgspec.Struct, frozen=True, tag=True):
    """The current step."""

    text: str


class Check(msgspec.Struct, frozen=True, tag=True):
    """One check, and whether it passed."""

    name: str
    expected: str
    observed: str
    ok: bool


class Timings(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds: compile_load, attach_per_pod (median), first_probe."""

    timings_ms: dict[str, float]


class Leftovers(msgspec.Struct, frozen=True, tag=True):
    """Kernel objects that must be gone after the stage has ended."""

    netns_inodes: list[int]
    program_ids: list[int]


StageMessage = Step | Check | Timings | Leftovers


def emit(message: StageMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def check(name: str, expected: str, observed: str, ok: bool | None = None) -> None:
    """Emit a check. ok: default: whether the observed value equals the expected one."""
    emit(Check(name, expected, observed, observed == expected if ok is None else ok))
