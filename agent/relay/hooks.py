"""The hooks that redirect connects to the relay, attached and watched beside the relay's loop.

To attach, to read and to detach one of a cgroup's programs takes the kernel's `cgroup_mutex`
(kernel/bpf/cgroup.c). Who moves a process from cgroup to cgroup keeps it until no task of the
machine is within a fork or an exit (`cgroup_attach_lock` in kernel/cgroup/cgroup.c), and a
BestEffort container on a busy node may be there for a second, since it gets no CPU. A loop that
waits that long forwards nothing, and its heartbeat is stale.
"""

import os
import pathlib
import queue
import threading
from collections.abc import Callable

from agent.relay.epoll import READABLE, EpollPoller
from bpf.redirect import Redirect

_Report = Callable[[], None]
"""Of one call: raises its error, or calls what follows."""


class RelayHooks:
    """Calls return at once. A thread makes them, one after the other; what follows each is called
    in the loop, or its error is raised there: `BpfError` or `OSError`."""

    def __init__(self, poller: EpollPoller, redirect: Redirect) -> None:
        self._redirect = redirect
        self.are_attached = True
        """False after a `check` that found one detached."""
        self._is_checking = False
        self._calls = queue.SimpleQueue[Callable[[], _Report] | None]()
        self._reports = queue.SimpleQueue[_Report]()
        self._reported = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        poller.register(self._reported, READABLE, self)
        self._thread = threading.Thread(target=self._make_calls, name="hooks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once all calls are made, end the thread. A relay need not: its process ends."""
        self._calls.put(None)
        self._thread.join()
        os.close(self._reported)

    def engage(self, cgroup: pathlib.Path, on_engaged: Callable[[], None]) -> None:
        """As `Redirect.engage`."""

        def engage() -> _Report:
            self._redirect.engage(cgroup)
            return on_engaged

        self._calls.put(engage)

    def disengage(self, on_disengaged: Callable[[], None]) -> None:
        """As `Redirect.disengage`."""

        def disengage() -> _Report:
            self._redirect.disengage()
            return on_disengaged

        self._calls.put(disengage)

    def check(self) -> None:
        """Have `are_attached` set, unless the check before is not over."""
        if not self._is_checking:
            self._is_checking = True
            self._calls.put(self._check)

    def _check(self) -> _Report:
        is_engaged = self._redirect.is_engaged

        def report() -> None:
            self._is_checking = False
            self.are_attached = is_engaged

        return report

    def on_event(self, _events: int) -> None:
        os.eventfd_read(self._reported)
        while not self._reports.empty():
            self._reports.get()()

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                report = call()
            except Exception as error:  # raised in the loop
                report = _raising(error)
            self._reports.put(report)
            os.eventfd_write(self._reported, 1)


def _raising(error: Exception) -> _Report:
    def report() -> None:
        raise error

    return report
