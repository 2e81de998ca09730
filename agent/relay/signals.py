"""Signals as events of the relay's loop.

A handler of Python runs between two of its instructions, and a wait for events continues after it
with the time that is left (PEP 475). So the handlers here do nothing, and what Python writes for
each signal is one more descriptor to wait for.
"""

import os
import signal
from collections.abc import Callable, Iterable

from agent.relay.epoll import READABLE, EpollPoller

# Of all signals at once: one byte each, and one is enough.
_READ_BYTES = 64


class Signals:
    """Calls a function after one of these signals, in the main thread, between other events."""

    def __init__(
        self,
        poller: EpollPoller,
        numbers: Iterable[signal.Signals],
        on_signal: Callable[[], None],
    ) -> None:
        """To be created in the main thread."""
        self._on_signal = on_signal
        self._read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, _do_nothing)
        poller.register(self._read_end, READABLE, self)

    def close(self) -> None:
        """The handlers stay, and do nothing."""
        os.close(signal.set_wakeup_fd(-1))
        os.close(self._read_end)

    def on_event(self, _events: int) -> None:
        os.read(self._read_end, _READ_BYTES)
        self._on_signal()


def _do_nothing(_number: int, _frame: object) -> None:
    pass
