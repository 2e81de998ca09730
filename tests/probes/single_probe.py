"""One probe of a real server, for tests of the prober."""

from __future__ import annotations

from probes.engine import prober
from probes.results import ProbeOutcome
from probes.spec.definitions import Handler, Probe
from tests.polling import PATIENCE
from tests.probes.conftest import Sandbox

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
ILL = b"HTTP/1.1 500 Ill\r\nContent-Length: 0\r\n\r\n"
SHORT = 0.2
LATE_MAX_SECONDS = 0.05 * PATIENCE**2
"""By how much a probe may outlast its timeout."""


async def run_probe(
    sandbox: Sandbox, handler: Handler, *addresses: str, seconds: float = 5.0
) -> ProbeOutcome:
    return await prober.probe(
        Probe(handler, timeout_seconds=seconds),
        netns=sandbox.netns,
        addresses=addresses or (sandbox.v4,),
    )


class Deadline:
    """How late probes end, not counting what this thread had to wait for a CPU.

    So a busy machine changes nothing, and work or a blocking call of podgate does.
    """

    def __init__(self) -> None:
        self._waited = waited_seconds()

    def is_kept(self, outcome: ProbeOutcome, timeout: float = SHORT) -> bool:
        """Whether a probe that started after this object was created ended soon enough after its
        timeout."""
        waited = waited_seconds() - self._waited
        return outcome.duration_seconds - waited < timeout + LATE_MAX_SECONDS


def waited_seconds() -> float:
    """What this thread has waited for a CPU (sched-stats.rst: the second number, in ns)."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as stream:
        return int(stream.read().split()[1]) / 1e9
