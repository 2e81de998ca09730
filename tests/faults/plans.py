"""What happens for a seed: one fault, and a pod that comes and one that goes meanwhile."""

import dataclasses
import errno
import random
from collections.abc import Callable, Mapping

from tests.faults import system_calls
from tests.faults.injector import Rule

SPACES = ("full", "read-only", "no inodes")
DAMAGES = ("empty", "half", "bytes", "removed", "directory", "fifo")
STATE_FILES = ("cni.json", "state/modes.json", "state/pods.json", "state/probes.json")
"""Of the run directory, of an agent of a cluster."""

# Shorter than the two seconds that a heartbeat may be old, even if nothing can be written.
_ALL_FAIL_SECONDS = 0.7
_SECONDS = (0.2, 1.5)
# A fault of a class is in all of it, or in what one part of the agent reads and writes. Netlink is
# of links, gates and nftables; inet of probes, API server and metrics; unix of runtime and clients.
_PATHS = ("", "", "/proc/", "/sys/fs/", "/run/", "{run}")
_FAMILIES = ("", "NETLINK", "INET", "UNIX")
_PROCESSES = ("all", "agent", "agent", "others")


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """kind: a key of `tests.faults.injecting.INJECTED`; detail: which of that kind; seconds: how
    long it lasts."""

    kind: str
    detail: str
    seconds: float
    rule: Rule | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.detail} for {self.seconds:.1f} s"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """mode: of the pod that comes; comes_after, goes_after: parts of the fault's time."""

    seed: int
    fault: Fault
    mode: str
    is_bridged: bool
    comes_after: float
    goes_after: float

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.fault}; a pod in {self.mode or 'the default mode'} comes "
            f"after {self.comes_after:.0%} of it, another goes after {self.goes_after:.0%}"
        )


def draw(seed: int) -> Plan:
    """The plan of a seed, the same at each call."""
    # A seed of its own for each plan: neighbouring seeds of Mersenne Twister differ from the start.
    chosen = random.Random(f"podgate faults {seed}")
    kinds = list(_KINDS)
    [kind] = chosen.choices(kinds, [_KINDS[name][0] for name in kinds])
    fault = _KINDS[kind][1](chosen)
    return Plan(
        seed,
        fault,
        mode=chosen.choice(("", "strict")),
        is_bridged=chosen.random() < 0.3,
        comes_after=chosen.uniform(0, 0.5),
        goes_after=chosen.uniform(0, 0.8),
    )


def _system_call(chosen: random.Random) -> Fault:
    name = chosen.choice(list(system_calls.CLASSES))
    calls, errors = system_calls.CLASSES[name]
    # One call alone half of the time: a class fails at its first call, and the others never run.
    if chosen.random() < 0.5:
        calls = (chosen.choice([call for call in calls if call in system_calls.NUMBERS]),)
    every = chosen.choice((1, 1, 2, 3, 7, 20))
    below, family = "", ""
    if name in ("open", "read", "stat", "write"):
        below = chosen.choice(_PATHS)
    elif name == "message":
        family = chosen.choice(_FAMILIES)
    process = chosen.choice(_PROCESSES)
    rule = Rule(calls, chosen.choice(errors), every, below, family, process)
    limit = _ALL_FAIL_SECONDS if every == 1 else _SECONDS[1]
    which = " ".join(filter(None, (below, family)))
    share = "each" if every == 1 else f"each {every}th"
    detail = f"{errno.errorcode[rule.error]} of {share} {'/'.join(calls)} ({process}) {which}"
    return Fault("system call", detail.rstrip(), chosen.uniform(_SECONDS[0], limit), rule)


def _one_of(kind: str, *details: str, longest: float = _SECONDS[1]) -> Callable[..., Fault]:
    def make(chosen: random.Random) -> Fault:
        return Fault(kind, chosen.choice(details), chosen.uniform(_SECONDS[0], longest))

    return make


def _damage(chosen: random.Random) -> Fault:
    return Fault("damage", f"{chosen.choice(STATE_FILES)}: {chosen.choice(DAMAGES)}", 0)


_KINDS: Mapping[str, tuple[int, Callable[[random.Random], Fault]]] = {
    "system call": (60, _system_call),
    "descriptors": (10, _one_of("descriptors", "none", "those in use", "five more")),
    "run directory": (10, _one_of("run directory", *SPACES)),
    "relay": (7, _one_of("relay", "killed", "stopped")),
    "API server": (5, _one_of("API server", "stopped", "unavailable")),
    "runtime": (4, _one_of("runtime", "stopped", "killed")),
    "damage": (4, _damage),
}
"""With their weights: what costs an agent's start is rare."""
