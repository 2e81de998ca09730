"""The relay's event loop, for tests of what it calls."""

import contextlib
from collections.abc import Iterator

import pytest

from agent.relay.epoll import EpollPoller


@pytest.fixture
def poller() -> Iterator[EpollPoller]:
    with contextlib.closing(EpollPoller()) as made:
        yield made
