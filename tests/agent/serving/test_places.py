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


def test_places_that_trusted_clients_hold_are_not_taken_from_others(places: Places) -> None:
    connect(places, ROOT, 3, is_silent=False)
    assert len(connect(places, MANY[0], 4, is_silent=False)) == 4
    assert len(connect(places, MANY[1], 4, is_silent=False)) == 3
    assert (places.open, places.rejected) == (10, 1)


def test_trusted_client_takes_the_last_place_of_another(places: Places) -> None:
    held = [one for peer in MANY[:8] for one in connect(places, peer, is_silent=False)]
    assert len(connect(places, ROOT, 4, is_silent=False)) == 4
    assert [one.is_closed for one in held] == [True, True] + 6 * [False]
    assert (places.open, places.rejected) == (10, 2)


def test_trusted_clients_share_the_places_that_they_hold(places: Places) -> None:
    places.trust(SCRAPER)
    scraper = connect(places, SCRAPER, 6, is_silent=False)
    root = connect(places, ROOT, 6, is_silent=False)
    assert [len(root), sum(one.is_closed for one in scraper)] == [5, 1]
    assert (places.open, places.rejected) == (10, 2)


def test_client_with_one_connection_takes_from_those_that_have_two_more(places: Places) -> None:
    held = connect(places, MANY[0], 5, is_silent=False)
    both = connect(places, MANY[1], 2, is_silent=False)
    found = connect(places, MANY[2], 3, is_silent=False)
    assert [one.is_closed for one in held] == [True, True] + 3 * [False]
    assert not any(one.is_closed for one in (*both, *found))
    # Another one would have fewer than this one afterwards.
    assert connect(places, MANY[2], is_silent=False) == []


def test_client_takes_a_silent_connection_only_from_those_that_have_more(places: Places) -> None:
    held = [one for peer in MANY[:4] for one in connect(places, peer, 2)]
    assert len(connect(places, MANY[4], 2)) == 2
    assert [one.is_closed for one in held] == [True, False] * 2 + 4 * [False]
    assert connect(places, MANY[4]) == []
    assert (places.open, places.rejected) == (8, 3)


def test_client_with_most_silent_connections_loses_one_first(places: Places) -> None:
    one, two = connect(places, MANY[0], 3), connect(places, MANY[1], 4)
    connect(places, MANY[2])
    connect(places, MANY[3])
    assert [each.is_closed for each in (*one, *two)] == 3 * [False] + [True] + 3 * [False]


def test_connection_that_is_served_and_silent_again_is_the_newest(places: Places) -> None:
    held = [one for peer in MANY[:8] for one in connect(places, peer)]
    (first, second, *_) = connect(places, MANY[8], 1) + held[1:]
    second.place.set_silent(False)
    second.place.set_silent(True)
    connect(places, MANY[9])
    assert [one.is_closed for one in (*held, first)] == [True, True] + 7 * [False]


def test_released_connection_is_not_counted_when_its_state_changes(places: Places) -> None:
    first, *others = connect(places, MANY[0], 6, is_silent=False)
    first.place.release()
    first.place.set_silent(True)
    first.place.release()
    assert places.open == 5
    assert len(connect(places, MANY[0], 2, is_silent=False)) == 1
    assert not any(one.is_closed for one in (first, *others))


def test_only_the_latest_trusted_clients_are_remembered(clock: Clock) -> None:
    places = Places(10, trusted=2, of_peer=6, max_trusted=2, now=clock)
    for peer in (MANY[0], MANY[1], MANY[0], MANY[2]):
        places.trust(peer)
    assert [places.is_trusted(peer) for peer in (*MANY[:4], ROOT)] == [
        True,
        False,
        True,
        False,
        True,
    ]


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


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("198.18.0.1", "198.18.0.1"),
        ("fd00:18::1:0:0:1", "fd00:18::/64"),
        ("fd00:18:0:1:ffff::1", "fd00:18:0:1::/64"),
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
    ],
)
def test_client_of_another_machine_is_named_by_its_address(address: str, name: str) -> None:
    assert peers.of_address(ipaddress.ip_address(address)) == Peer(name)


@pytest.mark.parametrize(
    ("uid", "peer"),
    [
        (0, ROOT),
        (65535, Peer("user 65535")),
        (65536, Peer("users of range 1")),
        (131_072, Peer("users of range 2")),
    ],
)
def test_client_of_this_machine_is_named_by_its_user(uid: int, peer: Peer) -> None:
    assert peers.of_user(uid) == peer


def test_users_that_one_container_may_have_are_one_client() -> None:
    assert peers.of_user(1000) != peers.of_user(1001)
    assert peers.of_user(131_072 + 1000) == peers.of_user(131_072 + 65_535)
    assert peers.of_user(0).is_root
    assert not peers.of_user(131_072).is_root
