"""Signals to a relay: handled at once, also while it waits for events."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.relay.epoll import EpollPoller
from agent.relay.signals import Signals

NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)
# No test waits that long, unless a signal does not end the wait.
LONG_SECONDS = 600


@pytest.fixture
def handled(poller: EpollPoller) -> Iterator[list[None]]:
    """An element for each call."""
    calls: list[None] = []
    before = {number: signal.getsignal(number) for number in NUMBERS}
    wakeup = signal.set_wakeup_fd(-1)
    signals = Signals(poller, NUMBERS, lambda: calls.append(None))
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)
    signals.close()
    signal.set_wakeup_fd(wakeup)


@pytest.mark.parametrize("number", NUMBERS)
def test_signal_before_a_wait_ends_it(
    poller: EpollPoller, handled: list[None], number: signal.Signals
) -> None:
    os.kill(os.getpid(), number)
    assert handled == []
    poller.poll(LONG_SECONDS)
    assert handled == [None]


def test_signal_ends_a_wait(poller: EpollPoller, handled: list[None]) -> None:
    # It waits by then, or this is the test above.
    with subprocess.Popen(["sh", "-c", f"sleep 0.05; kill -USR1 {os.getpid()}"]):
        poller.poll(LONG_SECONDS)
    assert handled == [None]


def test_signals_are_handled_once(poller: EpollPoller, handled: list[None]) -> None:
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    poller.poll(LONG_SECONDS)
    poller.poll(0)
    assert handled == [None]


def test_signals_without_a_wait_are_no_error(
    poller: EpollPoller, handled: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python writes for each of them has no room any more."""
    errors: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.get_blocking(int(name)):
                fcntl.fcntl(int(name), fcntl.F_SETPIPE_SZ, 4096)
    for _ in range(4200):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert errors == []
    poller.poll(LONG_SECONDS)
    assert handled == [None]
