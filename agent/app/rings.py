"""Two rings of components: what keeps pods isolated, and all else.

The outer ring's components start again after any failure and touch no other. A failure of the inner
ring (gates, heartbeat, the kubelet's identity, the default-deny table, modes) is retried if it is
the machine's and may pass: no descriptors, memory, room or threads. Anything else ends the agent:
gates stay pinned, the DaemonSet starts it again, and a node with half an inner ring would be worse.
"""

import asyncio
import errno
import random
from collections.abc import Callable, Iterator

import structlog
from prometheus_client import core

from agent import tasks
from agent.backoff import Jitter
from agent.errors import EXHAUSTED
from agent.linux.descriptors import Reserve
from agent.logs import Event
from agent.metrics import MetricFamily, labelled

log = structlog.get_logger(__name__)

FAILURES = MetricFamily(
    "podgate_component_failures_total",
    "counter",
    "Times that a part of the agent failed and started again by itself; the event component_failed "
    "has the error.",
    ("component",),
)

INNER = frozenset(
    (
        "watchdog",
        "readiness",
        "heartbeat",
        "default-deny",
        "kubelet",
        "reconciler",
        "modes",
        "off-marks",
        "off-switch",
    )
)
"""Names of the inner ring's components."""

_PASSING = frozenset(
    (*EXHAUSTED, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS, errno.EAGAIN, errno.EINTR, errno.EIO)
)
# Gates open declared ports after 15 s without a heartbeat.
_INNER_BASE_SECONDS, _INNER_CAP_SECONDS = 0.1, 2.0
# All is as before ten seconds after the end of what let components fail, however long it lasted.
_OUTER_CAP_SECONDS = 5.0
# A pass of the reconciler, a search for the kubelet, a dump of netlink and an nft command at the
# same time have some 20.
_RESERVED_DESCRIPTORS = 64
_REFILL_SECONDS = 5.0


class Rings:
    """The supervisors of both rings. For the event loop."""

    def __init__(self, *, on_restart: Callable[[], None], jitter: Jitter = random.random) -> None:
        """on_restart: called before a component starts again, which may have lost what it had
        taken from a queue. Raises `OSError` without free descriptors."""
        self._reserve = Reserve(_RESERVED_DESCRIPTORS)
        self._inner = tasks.Supervisor(
            restarts=may_pass,
            on_failure=self._handle_inner_failure,
            on_restart=on_restart,
            base_seconds=_INNER_BASE_SECONDS,
            cap_seconds=_INNER_CAP_SECONDS,
            jitter=jitter,
        )
        self._outer = tasks.Supervisor(
            on_restart=on_restart, cap_seconds=_OUTER_CAP_SECONDS, jitter=jitter
        )

    def supervisor(self, name: str) -> tasks.Supervisor:
        """Of the component with this name."""
        return self._inner if name in INNER else self._outer

    def problems(self) -> Iterator[str]:
        """One sentence for each component that fails."""
        for name, error in sorted((self._inner.failing() | self._outer.failing()).items()):
            yield f"Component {name} fails and starts again: {error.rstrip('.')}."

    def close(self) -> None:
        """Release what is reserved."""
        self._reserve.release()

    def collect(self) -> Iterator[core.Metric]:
        """As a collector of prometheus_client."""
        failures = self._inner.failures + self._outer.failures
        yield labelled(FAILURES, (((name,), count) for name, count in sorted(failures.items())))

    def _handle_inner_failure(self, error: Exception) -> None:
        if _numbers(error).isdisjoint(EXHAUSTED) or not len(self._reserve):
            return
        log.warning(Event.DESCRIPTORS_EXHAUSTED, released=len(self._reserve))
        self._reserve.release()
        asyncio.get_running_loop().call_later(_REFILL_SECONDS, self._refill)

    def _refill(self) -> None:
        if not self._reserve.refill():
            # As few as there are would be released for nothing.
            self._reserve.release()
            asyncio.get_running_loop().call_later(_REFILL_SECONDS, self._refill)


def may_pass(error: Exception) -> bool:
    """Whether it is the machine's state, which may be another in a moment."""
    if isinstance(error, ExceptionGroup):
        return all(may_pass(one) for one in error.exceptions if isinstance(one, Exception))
    # "can't start new thread" has no class of its own.
    is_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return isinstance(error, MemoryError) or is_thread or not _numbers(error).isdisjoint(_PASSING)


def _numbers(error: BaseException) -> set[int | None]:
    """The error numbers of an error, or of a group's."""
    if isinstance(error, BaseExceptionGroup):
        return {number for one in error.exceptions for number in _numbers(one)}
    return {error.errno} if isinstance(error, OSError) else set()
