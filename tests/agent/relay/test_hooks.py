"""The hooks' calls wait in a thread, and their results arrive in the relay's loop, in order."""

import errno
import pathlib
import threading
from collections.abc import Iterator

import pytest

from agent.relay.epoll import EpollPoller
from agent.relay.hooks import RelayHooks
from bpf.errors import BpfError
from bpf.redirect import Redirect
from tests.polling import PATIENCE_SECONDS

CGROUP = pathlib.Path("/sys/fs/cgroup")


class _SlowRedirect(Redirect):
    """Each call ends when the test lets it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.permits = threading.Semaphore(0)
        self.error: Exception | None = None
        self.is_attached = True

    def _wait(self, call: str) -> None:
        assert self.permits.acquire(timeout=PATIENCE_SECONDS)
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def engage(self, cgroup: pathlib.Path) -> None:
        self._wait(f"engage {cgroup}")

    def disengage(self) -> None:
        self._wait("disengage")

    @property
    def is_engaged(self) -> bool:
        self._wait("check")
        return self.is_attached


@pytest.fixture
def redirect() -> _SlowRedirect:
    return _SlowRedirect()


@pytest.fixture
def poller() -> Iterator[EpollPoller]:
    made = EpollPoller()
    yield made
    made.close()


@pytest.fixture
def hooks(poller: EpollPoller, redirect: _SlowRedirect) -> Iterator[RelayHooks]:
    made = RelayHooks(poller, redirect)
    yield made
    redirect.error = None
    redirect.permits.release(10)
    made.close()


def test_calls_are_made_one_after_the_other(
    hooks: RelayHooks, poller: EpollPoller, redirect: _SlowRedirect
) -> None:
    done: list[str] = []
    hooks.engage(CGROUP, lambda: done.append("engaged"))
    hooks.disengage(lambda: done.append("disengaged"))
    poller.poll(0)
    assert done == []
    redirect.permits.release(2)
    while len(done) < 2:
        poller.poll(PATIENCE_SECONDS)
    assert done == ["engaged", "disengaged"]
    assert redirect.calls == [f"engage {CGROUP}", "disengage"]


@pytest.mark.parametrize("error", [BpfError(errno.EPERM, "attaching"), ValueError("a fault")])
def test_error_is_raised_in_the_loop(
    hooks: RelayHooks, poller: EpollPoller, redirect: _SlowRedirect, error: Exception
) -> None:
    redirect.error = error
    hooks.engage(CGROUP, lambda: pytest.fail("not engaged"))
    redirect.permits.release()
    with pytest.raises(type(error)) as caught:
        poller.poll(PATIENCE_SECONDS)
    assert caught.value is error


def test_detached_hooks_are_found_by_a_check(
    hooks: RelayHooks, poller: EpollPoller, redirect: _SlowRedirect
) -> None:
    redirect.is_attached = False
    hooks.check()
    assert hooks.are_attached
    redirect.permits.release()
    poller.poll(PATIENCE_SECONDS)
    assert not hooks.are_attached


def test_no_check_begins_before_the_last_is_over(
    hooks: RelayHooks, poller: EpollPoller, redirect: _SlowRedirect
) -> None:
    for _ in range(3):
        hooks.check()
    redirect.permits.release()
    poller.poll(PATIENCE_SECONDS)
    hooks.check()
    redirect.permits.release()
    poller.poll(PATIENCE_SECONDS)
    assert redirect.calls == ["check", "check"]
