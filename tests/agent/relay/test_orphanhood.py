"""A relay without its agent continues for its time, while its hooks and the way to it last."""

import ipaddress
import socket
from collections.abc import Iterator

import pytest

from agent.relay.hooks import RelayHooks
from agent.relay.interfaces import WAY_PORT
from agent.relay.orphanhood import Orphanhood, OwnWay
from probes.netns import Netns

FREE, TAKEN = ipaddress.IPv4Address("127.0.0.76"), ipaddress.IPv4Address("127.0.0.77")
TRIES = 4
"""That are not answered, and then the way counts as lost."""


class _Here(Netns):
    """The test's own namespace, in which it needs no rights."""

    def socket(self, family: int, type: int, proto: int = 0) -> socket.socket:
        return socket.socket(family, type | socket.SOCK_NONBLOCK, proto)


HERE = _Here("", 0, 0)


class _Hooks(RelayHooks):
    def __init__(self) -> None:
        self.are_attached = True

    def check(self) -> None:
        pass


class _Way(OwnWay):
    def __init__(self) -> None:
        super().__init__(HERE, ())
        self.is_lost = False

    def is_blocked(self) -> bool:
        return self.is_lost


class _Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def taken() -> Iterator[None]:
    """Another process responds at the address."""
    with socket.create_server((str(TAKEN), WAY_PORT)):
        yield


def test_relay_continues_for_its_time() -> None:
    clock = _Clock()
    orphanhood = Orphanhood(600, _Way(), _Hooks(), clock)
    assert not orphanhood.is_over()
    clock.seconds = 599.9
    assert not orphanhood.is_over()
    clock.seconds = 600
    assert orphanhood.is_over()


def test_relay_ends_when_its_hooks_were_detached() -> None:
    hooks = _Hooks()
    orphanhood = Orphanhood(600, _Way(), hooks, _Clock())
    hooks.are_attached = False
    assert orphanhood.is_over()


def test_relay_ends_when_the_node_does_not_reach_it() -> None:
    way = _Way()
    orphanhood = Orphanhood(600, way, _Hooks(), _Clock())
    way.is_lost = True
    assert orphanhood.is_over()


def test_relay_whose_way_cannot_be_tried_goes_on() -> None:
    assert not Orphanhood(600, None, _Hooks(), _Clock()).is_over()


def test_way_is_free_while_each_connection_is_rejected() -> None:
    way = OwnWay(HERE, [FREE])
    assert not any(way.is_blocked() for _ in range(3 * TRIES))
    way.close()


def test_way_is_lost_after_a_second_without_a_rejection(taken: None) -> None:
    way = OwnWay(HERE, [FREE, TAKEN])
    assert [way.is_blocked() for _ in range(TRIES + 2)] == [*[False] * TRIES, True, True]
    way.close()


def test_way_is_not_lost_when_it_is_back_in_time() -> None:
    way = OwnWay(HERE, [TAKEN])
    for _ in range(3):
        with socket.create_server((str(TAKEN), WAY_PORT)):
            assert not any(way.is_blocked() for _ in range(TRIES - 1))
        assert not way.is_blocked()
        assert not way.is_blocked()
    way.close()
