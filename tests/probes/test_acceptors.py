"""When a probe's connection is looked up, and as which user the next one dials."""

import socket
from collections.abc import Iterator

import pytest

from probes import redirection
from probes.netns import Netns, NetnsGoneError
from probes.redirection import Acceptors, InnerWay, Redirection

POD = Netns("/run/netns/web", 4, 1)
WHERE = (POD, "198.18.0.1", 8080)
TO_PROXY = Redirection(15001, 5995, "Consul")


class Rules:
    """A pod's rules: users that they exempt. Answers only lookups of POD."""

    def __init__(self) -> None:
        self.now = 0.0
        self.exempt: set[int] = {0}
        self.is_gone = False
        self.is_same_port = True
        """Whether a server of the dialled port certainly accepts."""
        self.looked_up = 0
        self.acceptors = Acceptors(lambda: self.now)
        self.acceptor = self.acceptors.of(*WHERE)

    def find(
        self, netns: Netns, address: str, user: int, _: object
    ) -> tuple[Redirection | None, bool]:
        assert (netns, address) == WHERE[:2]
        self.looked_up += 1
        if self.is_gone:
            raise NetnsGoneError("it is gone")
        if user in self.exempt:
            return None, self.is_same_port
        return TO_PROXY, False

    def connect(self, sock: socket.socket) -> Redirection | None:
        """One probe: as long as the user changes, at most twice."""
        for _ in range(2):
            user = self.acceptor.user
            if not self.acceptor.is_due(user):
                return None
            found = self.acceptor.look_up(user, sock)
            if found is None or self.acceptor.user == user:
                return found
        return found


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Rules:
    made = Rules()
    monkeypatch.setattr(redirection, "_find_proxy", made.find)
    return made


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


def test_connection_is_looked_up_once_in_ten_seconds(rules: Rules, sock: socket.socket) -> None:
    for rules.now in (0.0, 1.0, 9.9):
        assert rules.connect(sock) is None
    assert rules.looked_up == 1
    rules.now = 10.0
    rules.connect(sock)
    assert rules.looked_up == 2


def test_connection_after_a_failure_is_looked_up(rules: Rules, sock: socket.socket) -> None:
    rules.connect(sock)
    rules.acceptor.doubt()
    rules.exempt = set()
    assert rules.connect(sock) == TO_PROXY


def test_other_ports_and_namespaces_are_looked_up_by_themselves(rules: Rules) -> None:
    with socket.socket() as sock:
        rules.connect(sock)
    assert not rules.acceptors.of(*WHERE).is_due(0)
    assert rules.acceptors.of(POD, "198.18.0.1", 8081).is_due(0)
    assert rules.acceptors.of(Netns("/run/netns/web", 4, 2), "198.18.0.1", 8080).is_due(0)


def test_user_of_the_proxy_dials_from_then_on(rules: Rules, sock: socket.socket) -> None:
    rules.exempt = {5995}
    assert rules.connect(sock) is None
    assert rules.acceptor.user == 5995
    assert rules.looked_up == 2
    rules.now = 10.0
    assert rules.connect(sock) is None
    assert rules.looked_up == 3


def test_root_dials_again_where_the_proxys_user_is_redirected(
    rules: Rules, sock: socket.socket
) -> None:
    rules.exempt = {5995}
    rules.connect(sock)
    rules.exempt, rules.now = {0}, 10.0
    assert rules.connect(sock) is None
    assert rules.acceptor.user == 0


def test_user_that_is_redirected_too_is_tried_every_ten_seconds(
    rules: Rules, sock: socket.socket
) -> None:
    rules.exempt = set()
    assert rules.connect(sock) == TO_PROXY
    assert rules.looked_up == 2
    for rules.now in (1.0, 2.0):
        assert rules.connect(sock) == TO_PROXY
    assert rules.looked_up == 4
    rules.now = 10.0
    rules.exempt = {5995}
    assert rules.connect(sock) is None


def test_pod_that_ends_meanwhile_shows_nothing(rules: Rules, sock: socket.socket) -> None:
    rules.is_gone = True
    assert rules.connect(sock) is None


def test_way_of_a_port_names_the_user_that_is_exempt(rules: Rules, sock: socket.socket) -> None:
    def ways() -> dict[str, InnerWay]:
        return rules.acceptors.ways(POD, [WHERE[1], "198.18.0.2"])

    assert ways() == {}
    rules.exempt = {TO_PROXY.user}
    assert rules.connect(sock) is None
    assert ways() == {WHERE[1]: InnerWay(TO_PROXY, TO_PROXY.user)}
    rules.exempt = set()
    rules.now = 10.0
    rules.connect(sock)
    assert ways() == {WHERE[1]: InnerWay(TO_PROXY, None)}
    rules.exempt = {0}
    rules.now = 20.0
    rules.connect(sock)
    assert ways() == {}


def test_rejected_connection_shows_that_its_user_is_exempt(
    rules: Rules, sock: socket.socket
) -> None:
    """The application is down, so no connection of that user is looked up."""

    def way_after_rejection(user: int) -> InnerWay | None:
        rules.acceptor.note_rejection(user)
        return rules.acceptor.way

    rules.exempt = set()
    rules.connect(sock)
    assert way_after_rejection(TO_PROXY.user) == InnerWay(TO_PROXY, TO_PROXY.user)
    assert way_after_rejection(0) is None
    assert way_after_rejection(TO_PROXY.user) is None


def test_address_has_the_way_of_its_port_without_an_exempt_user(
    rules: Rules, sock: socket.socket
) -> None:
    for port, exempt in ((1, {TO_PROXY.user}), (2, set()), (3, {0})):
        rules.exempt = exempt
        rules.acceptor = rules.acceptors.of(*WHERE[:2], port)
        rules.connect(sock)
    assert rules.acceptors.ways(POD, [WHERE[1]]) == {WHERE[1]: InnerWay(TO_PROXY, None)}


def test_each_port_keeps_its_acceptor_until_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redirection, "_ACCEPTORS_MAX", 2)
    acceptors = Acceptors(lambda: 0.0)
    first, second = acceptors.of(POD, "198.18.0.1", 1), acceptors.of(POD, "198.18.0.1", 2)
    assert acceptors.of(POD, "198.18.0.1", 1) is first
    assert acceptors.of(POD, "198.18.0.1", 2) is second
    acceptors.of(POD, "198.18.0.1", 3)
    assert acceptors.of(POD, "198.18.0.1", 1) is not first


def test_a_connection_is_direct_once_its_server_was_looked_up(
    rules: Rules, sock: socket.socket
) -> None:
    assert not rules.acceptors.is_direct(*WHERE)
    rules.connect(sock)
    assert rules.acceptors.is_direct(*WHERE)


def test_a_connection_to_another_port_of_the_pod_is_not_direct(
    rules: Rules, sock: socket.socket
) -> None:
    rules.is_same_port = False
    assert rules.connect(sock) is None
    assert not rules.acceptors.is_direct(*WHERE)


def test_the_connection_of_an_exempt_user_is_not_direct(rules: Rules, sock: socket.socket) -> None:
    rules.exempt = {5995}
    assert rules.connect(sock) is None
    assert not rules.acceptors.is_direct(*WHERE)


def test_no_connection_is_direct_after_a_doubt_until_it_was_looked_up(
    rules: Rules, sock: socket.socket
) -> None:
    rules.connect(sock)
    rules.acceptors.doubt(Netns("/run/netns/other", 4, 2))
    assert rules.acceptors.is_direct(*WHERE)
    rules.acceptors.doubt(POD)
    assert not rules.acceptors.is_direct(*WHERE)
    rules.connect(sock)
    assert rules.acceptors.is_direct(*WHERE)
    rules.acceptors.doubt()
    assert not rules.acceptors.is_direct(*WHERE)
