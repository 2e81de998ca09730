"""What the stage tells the supervisor: one JSON object a line."""

import sys

import msgspec


class Step(msgspec.Struct, frozen=True, tag=True):
    """What is being done now."""

    text: str


class Check(msgspec.Struct, frozen=True, tag=True):
    """One promise, and whether it held."""

    name: str
    expected: str
    observed: str
    ok: bool


class Timings(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds: compile_load, attach_per_pod (median), first_probe."""

    timings_ms: dict[str, float]


class Traces(msgspec.Struct, frozen=True, tag=True):
    """What the kernel must have forgotten when the stage has ended."""

    netns_inodes: list[int]
    program_ids: list[int]


Event = Step | Check | Timings | Traces


def emit(event: Event) -> None:
    """Tell it."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def check(name: str, expected: str, observed: str, ok: bool | None = None) -> None:
    """Tell of one promise. ok: whether it held, if not by being the same."""
    emit(Check(name, expected, observed, observed == expected if ok is None else ok))
