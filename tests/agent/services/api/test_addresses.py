"""Addresses and networks as people and controllers write them."""

import ipaddress

import pytest

from agent.services.api import addresses
from agent.services.api.addresses import CanonicalAddress


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("198.18.0.1", "198.18.0.1"),
        (" 198.18.0.1\n", "198.18.0.1"),
        ("198.018.000.001", "198.18.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("FD00:0018::0001", "fd00:18::1"),
        ("64:ff9b::198.18.0.1", "64:ff9b::c612:1"),
        ("0:0:0:0:0:0:198.18.0.1", "::c612:1"),
        ("::", "::"),
    ],
)
def test_address_is_canonical(text: str, canonical: str) -> None:
    value = ipaddress.ip_address(canonical)
    assert addresses.parse(text) == CanonicalAddress(value.version == 6, value.packed, canonical)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "198.18.0",
        "198.18..1",
        "198.18.0.256",
        "198.18.0.1/32",
        "198.18.0.1%eth0",
        "fe80::1%eth0",
        "::ffff:198.18.0.1",
        "::ffff:198.18.0.1%eth0",
    ],
)
def test_text_that_is_no_address_of_a_host_is_none(text: str) -> None:
    assert addresses.parse(text) is None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("198.18.0.0/15", "198.18.0.0/15"),
        (" 198.18.3.7 / 24 ", "198.18.3.0/24"),
        ("198.018.3.7/24", "198.18.3.0/24"),
        ("198.18.0.1", "198.18.0.1/32"),
        ("FD00:18:0::1/64", "fd00:18::/64"),
        ("fd00:18::1", "fd00:18::1/128"),
        ("::/0", "::/0"),
        ("198.18.0.0/33", None),
        ("198.18.0.0/", None),
        ("198.18.0.0/-1", None),
        ("198.18.0.0/255.254.0.0", None),
        ("/15", None),
        ("all", None),
    ],
)
def test_network_is_canonical_or_none(text: str, canonical: str | None) -> None:
    assert addresses.parse_network(text) == canonical
