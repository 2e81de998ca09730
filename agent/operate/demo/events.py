"""Messages from the stage to the supervisor: one JSON object per line."""

import enum
import sys

import msgspec


class Danger(enum.StrEnum):
    """What a state means for the pods: the colour in which it is shown."""

    OPEN = "open"
    """Host processes reach the pod, or podgate does not work."""
    COUNTED = "counted"
    """Traffic passes and is counted, or a state is not the desired one."""
    CLOSED = "closed"
    NEUTRAL = "neutral"


class Subject(enum.StrEnum):
    """What a fact is about. The picture shows the newest facts of HOST and KUBELET."""

    HOST = "host"
    KUBELET = "kubelet"
    OTHER = "other"


class Fact(msgspec.Struct, frozen=True):
    """A few words that an act has shown, once its checks have passed."""

    text: str
    danger: Danger = Danger.NEUTRAL
    subject: Subject = Subject.OTHER


class Act(msgspec.Struct, frozen=True, tag=True):
    """The start of an act. Messages until the next one belong to it."""

    name: str
    sentence: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """The current step."""

    text: str


class Check(msgspec.Struct, frozen=True, tag=True):
    """One check, whether it passed, and what it has shown then."""

    name: str
    expected: str
    observed: str
    ok: bool
    fact: Fact | None = None


class PodScene(msgspec.Struct, frozen=True):
    """One pod of the picture. gate, state: as the agent reports them."""

    name: str
    gate: Fact
    state: Fact


class Scene(msgspec.Struct, frozen=True, tag=True):
    """The node as it is now, for the picture."""

    agent: Fact
    pods: list[PodScene]


class Evidence(msgspec.Struct, frozen=True, tag=True):
    """A command of podgate and its output, with the terminal's escape sequences."""

    command: str
    output: str


class Timings(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds: compile_load, attach_per_pod (median), first_probe, strict, pod_unready,
    pod_ready."""

    milliseconds: dict[str, float]


class Leftovers(msgspec.Struct, frozen=True, tag=True):
    """Kernel objects that must be gone after the stage has ended."""

    netns_cookies: dict[int, int | None]
    """Of network namespaces, by inode."""
    program_ids: list[int]


StageMessage = Act | Step | Check | Scene | Evidence | Timings | Leftovers


def emit(message: StageMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def check(
    name: str, expected: str, observed: str, ok: bool | None = None, fact: Fact | None = None
) -> None:
    """Emit a check. ok: default: whether the observed value equals the expected one."""
    emit(Check(name, expected, observed, observed == expected if ok is None else ok, fact))
