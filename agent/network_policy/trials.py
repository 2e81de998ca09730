"""Tries the flows of one direction, and puts into words what they showed.

What must not arrive is sent first. Once a packet that must arrive has, the path works, and what was
sent before it is late only if the engine let it pass another way; so a moment more decides. Where
policies admit nothing, silence is all that there is to see: the packet is sent several times.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from agent import tasks
from agent.network_policy.arrivals import Arrivals, Sent
from agent.network_policy.checks import Checks, Flow
from bpf.abi import IPAddress
from probes.netns import Netns

# On one node a packet takes 0.1 ms, and the first waits for its neighbour's address: a second
# covers one lost request (neigh(9): retrans_time_ms).
_ARRIVAL_SECONDS = 1.2
_LATE_SECONDS = 0.05
_SILENCE_SECONDS = 0.2
_SILENT_TRIES = 3


class Place(msgspec.Struct, frozen=True):
    """A pod's network namespace, and its address of one family."""

    netns: Netns
    address: IPAddress


class Trial(msgspec.Struct, frozen=True):
    """What the flows of one direction showed. is_passed: what policies drop did not arrive, and
    what they admit did; text: one clause."""

    is_passed: bool
    text: str


async def run(checks: Checks, pod: Place, witness: Place) -> Trial:
    """Raises NetnsGoneError and OSError."""
    source, destination = (witness, pod) if checks.direction == "Ingress" else (pod, witness)
    way = f"{checks.direction.lower()} {'from' if source is witness else 'to'} the witness"
    dropped, admitted = checks.dropped, checks.admitted
    if not (dropped or admitted):
        return Trial(True, f"{way}: policies leave nothing that would show whether they apply")
    arrivals = Arrivals((source.netns, source.address), (destination.netns, destination.address))
    try:
        has_passed, is_reached = await _observe(arrivals, dropped, admitted)
    finally:
        await tasks.close_in_thread(arrivals.close)
    by = _named(checks.policies)
    if dropped and has_passed:
        return Trial(False, f"{way}: {dropped} arrives, though {by} drops it")
    if admitted and not is_reached:
        return Trial(False, f"{way}: {admitted} does not arrive, though {by} admits it")
    seen = [f"{dropped} is dropped"] if dropped else []
    seen += [f"{admitted} arrives"] if admitted else []
    return Trial(True, f"{way}: {', '.join(seen)}")


async def _observe(
    arrivals: Arrivals, dropped: Flow | None, admitted: Flow | None
) -> tuple[bool, bool]:
    """Whether each of them arrives. At most one of them is None."""
    if admitted is not None:
        late = arrivals.send(dropped) if dropped else None
        is_reached = await _arrives(arrivals, arrivals.send(admitted), _ARRIVAL_SECONDS)
        return late is not None and await _arrives(arrivals, late, _LATE_SECONDS), is_reached
    assert dropped is not None
    all_sent = []
    for _ in range(_SILENT_TRIES):
        all_sent.append(arrivals.send(dropped))
        await _arrives(arrivals, all_sent[-1], _SILENCE_SECONDS)
        # One of those before may be late.
        if any(map(arrivals.has, all_sent)):
            return True, False
    return False, False


async def _arrives(arrivals: Arrivals, sent: Sent, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    received = asyncio.Event()
    loop.add_reader(arrivals, received.set)
    try:
        async with asyncio.timeout(seconds):
            while not arrivals.has(sent):
                received.clear()
                await received.wait()
            return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(arrivals)


def _named(policies: Sequence[str]) -> str:
    more = len(policies) - 1
    return policies[0] if not more else f"{policies[0]} (of {more + 1})"
