"""Which of the node's addresses have node ports."""

import ipaddress

import pytest

from agent.services.proxy import node_addresses

ADDRESSES = tuple(
    map(
        ipaddress.ip_address,
        ("127.0.0.1", "198.18.0.1", "198.19.0.1", "::1", "fd00:18::1", "fd00:19::1", "fe80::1"),
    )
)


@pytest.mark.parametrize(
    ("texts", "selected"),
    [
        ([], ["198.18.0.1", "198.19.0.1", "fd00:18::1", "fd00:19::1"]),
        (["198.18.0.0/16"], ["198.18.0.1", "fd00:18::1", "fd00:19::1"]),
        (["198.18.0.0/16,fd00:19::1"], ["198.18.0.1", "fd00:19::1"]),
        (
            ["198.18.0.0/16", "198.19.0.0/16"],
            ["198.18.0.1", "198.19.0.1", "fd00:18::1", "fd00:19::1"],
        ),
        (["0.0.0.0/0", "fd00:20::/32"], ["198.18.0.1", "198.19.0.1"]),
    ],
)
def test_family_without_a_network_has_all_its_addresses(
    texts: list[str], selected: list[str]
) -> None:
    """As NewNodePortAddresses (kube-proxy, pkg/proxy/util) has it."""
    found = node_addresses.parse(texts).selected(ADDRESSES)
    assert [str(address) for address in found] == selected


@pytest.mark.parametrize(
    ("texts", "is_all"),
    [
        ([], True),
        (["0.0.0.0/0", "::/0"], True),
        (["198.18.0.0/16"], False),
        (["primary"], False),
    ],
)
def test_only_a_selection_of_all_includes_later_addresses(texts: list[str], is_all: bool) -> None:
    assert node_addresses.parse(texts).is_all == is_all


@pytest.mark.parametrize("texts", [["primary", "198.18.0.0/16"], ["198.18.0.1/16"], ["here"]])
def test_what_is_no_selection_is_rejected(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"primary|host bits|IPv4 or IPv6"):
        node_addresses.parse(texts)
