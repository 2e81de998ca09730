"""Local routes of one origin, in a namespace of the test."""

import contextlib
import ipaddress
import subprocess
from collections.abc import Iterator

import pytest

from agent.linux.local_routes import LocalRoutes

pytestmark = pytest.mark.kernel

ORIGIN, ANOTHER = 113, 114
ADDRESSES = [ipaddress.ip_address(one) for one in ("198.18.0.80", "fd00:18::80")]


@pytest.fixture
def routes(isolated: None) -> Iterator[LocalRoutes]:
    with contextlib.closing(LocalRoutes(ORIGIN)) as made:
        yield made
        for address in made.addresses():
            made.remove(address)


def shown() -> str:
    """By iproute2."""
    commands = (
        ("ip", family, "route", "show", "table", "local", "proto", str(ORIGIN))
        for family in ("-4", "-6")
    )
    return "".join(subprocess.check_output(command, text=True) for command in commands)


def test_routes_are_added_listed_and_removed(routes: LocalRoutes) -> None:
    for address in ADDRESSES:
        routes.add(address)
        routes.add(address)
    assert routes.addresses() == ADDRESSES
    for address in ADDRESSES:
        assert f"local {address} dev lo" in shown()
    for address in ADDRESSES:
        routes.remove(address)
        routes.remove(address)
    assert routes.addresses() == []
    assert shown() == ""


def test_routes_of_another_origin_stay(routes: LocalRoutes) -> None:
    (address, *_) = ADDRESSES
    with contextlib.closing(LocalRoutes(ANOTHER)) as others:
        others.add(address)
        assert routes.addresses() == []
        assert others.addresses() == [address]
        others.remove(address)
