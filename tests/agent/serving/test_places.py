"""Who gets a place where clients hold many: no client keeps another one out."""

import ipaddress

import pytest

from agent.serving import peers
from agent.serving.places import Peer, Place, Places

ROOT = Peer("user 0", is_root=True)
MANY = [Peer(f"user {number}") for number in range(1, 100)]
SCRAPER = Peer("198.18.0.9")


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def places(clock: Clock) -> Places:
    """Of 10 in all; 2 are for trusted clients, and no client has more than 6."""
    return Places(10, trusted=2, of_peer=6, now=clock)


class Connection:
    """A place and what happened to its connection."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_closed = False
        place.close = self._close

    def _close(self) -> None:
        self.is_closed = True


def connect(
    places: Places, peer: Peer, times: int = 1, *, is_silent: bool = True
) -> list[Connection]:
    """Those that got a place."""
    found = []
    for _ in range(times):
        if place := places.take(peer):
            place.set_silent(is_silent)
            found.append(Connection(place))
    return found


def test_client_beyond_its_share_loses_its_own_oldest_silent_connection(places: Places) -> None:
    first, *others = connect(places, MANY[0], 7)
    assert first.is_closed
    assert not any(other.is_closed for other in others)
    assert places.open == 6
    assert places.rejected == 1


def test_client_beyond_its_share_is_rejected_while_all_its_connections_are_served(
    places: Places,
) -> None:
    found = connect(places, MANY[0], 7, is_silent=False)
    assert len(found) == 6
    assert not any(one.is_closed for one in found)
    assert places.rejected == 1


def test_two_clients_that_hold_all_lose_places_to_a_third(places: Places) -> None:
    held = connect(places, MANY[0], 4, is_silent=False) + connect(
        places, MANY[1], 4, is_silent=False
    )
    # Each of three ends with about as many.
    assert len(connect(places, MANY[2], 3, is_silent=False)) == 2
    assert sum(one.is_closed for one in held) == 2
    assert places.open == 8


def test_served_connections_of_clients_with_one_each_are_not_closed_for_another_client(
    places: Places,
) -> None:
    held = [one for peer in MANY[:8] for one in connect(places, peer, is_silent=False)]
    assert connect(places, MANY[8]) == []
    assert not any(one.is_closed for one in held)


def test_the_oldest_silent_connection_is_closed_for_a_client_that_has_none(places: Places) -> None:
    held = [one for peer in MANY[:8] for one in connect(places, peer)]
    assert len(connect(places, MANY[8])) == 1
    assert [one.is_closed for one in held] == [True] + 7 * [False]
    # A client that renews its connections takes only from others that are as silent.
    assert len(connect(places, MANY[9])) == 1
    assert [one.is_closed for one in held] == 2 * [True] + 6 * [False]


def test_silent_connections_go_before_served_ones(places: Places) -> None:
    served = connect(places, MANY[0], 6, is_silent=False)
    silent = [one for peer in MANY[1:3] for one in connect(places, peer)]
    assert len(connect(places, MANY[3])) == 1
    assert [one.is_closed for one in silent] == [True, False]
    assert not any(one.is_closed for one in served)


def test_root_has_places_that_no_other_gets(places: Places) -> None:
    for peer in MANY:
        connect(places, peer, 6, is_silent=False)
    assert places.open == 8
    assert len(connect(places, ROOT, 2, is_silent=False)) == 2
    # And further ones at the expense of others.
    assert len(connect(places, ROOT, 2, is_silent=False)) == 2
    assert places.open == 10


def test_client_that_was_authorized_keeps_a_share_for_a_time(places: Places, clock: Clock) -> None:
    for (one,) in [connect(places, SCRAPER)]:
        one.place.trust()
        one.place.release()
    for peer in MANY:
        connect(places, peer, 6, is_silent=False)
    assert places.open == 8
    (one,) = connect(places, SCRAPER)
    one.place.release()
    clock.seconds += 3600
    assert connect(places, SCRAPER) == []


def test_place_is_released_once(places: Places) -> None:
    (one,) = connect(places, MANY[0])
    one.place.release()
    one.place.release()
    one.place.set_silent(False)
    assert places.open == 0


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("198.18.0.1", "198.18.0.2", False),
        ("fd00:18::1", "fd00:18::ffff:1", True),
        ("fd00:18::1", "fd00:18:0:1::1", False),
        # Where the kernel does not name the user: one process may have any of these.
        ("127.0.0.1", "127.7.7.7", True),
    ],
)
def test_addresses_that_one_machine_may_have_are_one_client(
    one: str, other: str, are_same: bool
) -> None:
    first, second = (peers.of_address(ipaddress.ip_address(text)) for text in (one, other))
    assert (first == second) is are_same


def test_users_that_one_container_may_have_are_one_client() -> None:
    assert peers.of_user(1000) != peers.of_user(1001)
    assert peers.of_user(131_072 + 1000) == peers.of_user(131_072 + 65_535)
    assert peers.of_user(0).is_root
    assert not peers.of_user(131_072).is_root
