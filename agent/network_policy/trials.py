"""Tries the flows of one direction, and puts into words what they showed.

What must not arrive is sent first. Once a packet that must arrive has, the path works, and what was
sent before it is late only if the engine let it pass another way; so a moment more decides. Where
policies admit nothing, silence is all that there is to see: the packet is sent several times.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from agent.network_policy.arrivals import Attempt
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
    dropped, admitted = checks.dropped, checks.admitted
    if admitted is None:
        is_reached = True
        has_passed = dropped is not None and await _passes(dropped, source, destination)
    else:
        async with contextlib.AsyncExitStack() as stack:
            late = None
            if dropped is not None:
                late = await stack.enter_async_context(_attempt(dropped, source, destination))
            shown = await stack.enter_async_context(_attempt(admitted, source, destination))
            is_reached = await _has_arrived(shown, _ARRIVAL_SECONDS)
            has_passed = late is not None and await _has_arrived(late, _LATE_SECONDS)
    way = f"{checks.direction.lower()} {'from' if source is witness else 'to'} the witness"
    by = _named(checks.policies)
    if dropped and has_passed:
        return Trial(False, f"{way}: {dropped} arrives, though {by} drops it")
    if admitted and not is_reached:
        return Trial(False, f"{way}: {admitted} does not arrive, though {by} admits it")
    if dropped or admitted:
        seen = [f"{dropped} is dropped"] if dropped else []
        seen += [f"{admitted} arrives"] if admitted else []
        return Trial(True, f"{way}: {', '.join(seen)}")
    return Trial(True, f"{way}: policies leave nothing that would show whether they are in force")


async def _passes(dropped: Flow, source: Place, destination: Place) -> bool:
    """Whether what is to be dropped arrives, where nothing may."""
    for _ in range(_SILENT_TRIES):
        async with _attempt(dropped, source, destination) as made:
            if await _has_arrived(made, _SILENCE_SECONDS):
                return True
    return False


@contextlib.asynccontextmanager
async def _attempt(flow: Flow, source: Place, destination: Place) -> AsyncIterator[Attempt]:
    ends = (source.netns, source.address), (destination.netns, destination.address)
    made = Attempt(flow, *ends)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def _has_arrived(made: Attempt, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    received = asyncio.Event()
    loop.add_reader(made, received.set)
    try:
        async with asyncio.timeout(seconds):
            while not made.has_arrived():
                received.clear()
                await received.wait()
            return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(made)


def _named(policies: Sequence[str]) -> str:
    more = len(policies) - 1
    return policies[0] if not more else f"{policies[0]} (of {more + 1})"
