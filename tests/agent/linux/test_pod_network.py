"""A pod's interfaces and addresses, from inside and from the host."""

import errno
import ipaddress
import os
import pathlib
import socket
import struct
from typing import Any, cast

import pytest

from agent.linux import netlink, pod_network
from agent.linux.netlink import Exchange
from agent.linux.pod_network import HostInterface, PodNetwork, PodNetworkReader
from agent.linux.rtnetlink import Link
from bpf.abi import IPAddress
from bpf.netlink import NLM_F_ACK, NLM_F_DUMP, attribute
from probes.netns import Netns
from tests.agent.linux.route_answers import OWN_ERRORS, Answers

POD = Netns("/run/netns/web", 4, 1)
_UP, _LOOPBACK = 1, 8
_GETADDR, _NEWNSID, _GETNSID = 22, 88, 90


def addresses(*texts: str) -> list[IPAddress]:
    return [ipaddress.ip_address(text) for text in texts]


Found = tuple[list[Link], list[tuple[int, IPAddress]], list[tuple[Link, Link | None]], int | None]


async def read(monkeypatch: pytest.MonkeyPatch, found: Found) -> PodNetwork:
    async def within(call: object, *, netns: Netns) -> Found:
        assert netns is POD
        return found

    monkeypatch.setattr(netlink, "within", within)
    return await PodNetworkReader().read(POD)


LO = Link(1, "lo", _UP | _LOOPBACK, is_ethernet=False)
ETH0 = Link(2, "eth0", kind="veth", peer=7, peer_nsid=0)
ETH0_ON_HOST = Link(7, "veth7", kind="veth", peer=2, peer_nsid=5, master=3)
INNER = Link(3, "docker1", kind="veth", peer=8)


async def test_network_of_a_pod_has_what_can_be_gated_and_what_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = [
        *(LO, ETH0, INNER),
        Link(4, "net1", kind="macvlan"),
        Link(5, "sriov", kind=None),
        Link(6, "down", 0, kind="ipvlan"),
        Link(9, "tap0", 0, kind="tun", is_tap=True),
    ]
    v4, other_v4, v6, local_v6 = addresses("198.18.0.9", "198.18.0.2", "fd00:18::1", "fe80::1")
    loopback_v4, loopback_v6 = addresses("127.0.0.1", "::1")
    assigned = [
        *((1, loopback_v6), (1, loopback_v4), (2, v6), (2, local_v6), (2, v4), (4, other_v4)),
        # Of an interface that has come after the list of them, and on the loopback.
        *((10, other_v4), (1, v4)),
    ]
    # The number of the other one is that of an interface of the host by chance.
    peers = [(ETH0, ETH0_ON_HOST), (INNER, Link(8, "veth8", kind="veth", peer=3, peer_nsid=6))]
    found = await read(monkeypatch, (links, assigned, [*peers, (INNER, None)], 5))
    assert found == PodNetwork(
        (HostInterface(7, "veth7", 3),),
        (other_v4, v4, v6, local_v6),
        (
            "interface net1 (macvlan) cannot be gated",
            "interface sriov (a physical device) cannot be gated",
        ),
        *(5, ("docker1", "net1", "sriov"), ("tap0",), False),
        {
            "eth0": ("198.18.0.9", "fd00:18::1", "fe80::1"),
            "net1": ("198.18.0.2",),
            "lo": ("198.18.0.9",),
        },
    )
    assert found.probe_addresses == ("198.18.0.2", "198.18.0.9", "fd00:18::1")


@pytest.mark.parametrize(
    ("other", "nsid", "is_pods"),
    [
        (ETH0_ON_HOST, 5, True),
        (ETH0_ON_HOST, 6, False),
        (ETH0_ON_HOST, None, False),
        (Link(7, "veth7", kind="veth", peer=2), None, False),
        (Link(7, "veth7", kind="veth", peer=3, peer_nsid=5), 5, False),
        (Link(7, "veth7", kind="vxcan", peer=2, peer_nsid=5), 5, False),
        (None, 5, False),
    ],
)
async def test_interface_of_the_host_is_a_pod_s_as_seen_from_both_ends(
    monkeypatch: pytest.MonkeyPatch, other: Link | None, nsid: int | None, is_pods: bool
) -> None:
    found = await read(monkeypatch, ([LO, ETH0], [], [(ETH0, other)], nsid))
    assert found.interfaces == ((HostInterface(7, "veth7", 3),) if is_pods else ())
    assert found.other_devices == (() if is_pods else ("eth0",))


@pytest.mark.parametrize(("flags", "is_down"), [(_LOOPBACK, True), (_LOOPBACK | _UP, False)])
async def test_loopback_may_be_down(
    monkeypatch: pytest.MonkeyPatch, flags: int, is_down: bool
) -> None:
    found = await read(monkeypatch, ([Link(1, "lo", flags), Link(2, "a", 0)], [], [], None))
    assert found == PodNetwork((), (), (), None, is_loopback_down=is_down)


def address(family: int, ifindex: int, *attributes: tuple[int, str]) -> bytes:
    """struct ifaddrmsg, and IFA_ADDRESS (1) or IFA_LOCAL (2)."""
    packed = [attribute(kind, ipaddress.ip_address(text).packed) for kind, text in attributes]
    return struct.pack("=BBBBI", family, 24, 0, 0, ifindex) + b"".join(packed)


async def test_own_addresses_are_read_and_not_those_of_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(
        [
            address(socket.AF_INET, 2, (1, "198.18.0.1"), (2, "198.18.0.2")),
            address(socket.AF_INET6, 2, (1, "fd00:18::1")),
            address(socket.AF_INET6, 1, (2, "::1")),
            address(45, 2, (1, "198.18.0.7")),
            address(socket.AF_INET, 2),
        ]
    )
    monkeypatch.setattr(netlink, "within", answers.within)
    assert await pod_network.addresses_in(POD) == {*addresses("198.18.0.2", "fd00:18::1", "::1")}
    assert answers.requests == [(_GETADDR, bytes(8), NLM_F_DUMP)]


def nsid(number: int) -> bytes:
    """struct rtgenmsg and NETNSA_NSID; -1: the namespace has none."""
    return bytes(4) + attribute(1, struct.pack("=i", number))


async def number_of(
    monkeypatch: pytest.MonkeyPatch, path: str, *responses: list[bytes] | int
) -> tuple[int | None, list[tuple[int, int]]]:
    """The number, and kinds and flags of the requests for it."""
    answers = Answers(*responses)
    monkeypatch.setattr(netlink, "within", answers.within)
    before = os.listdir("/proc/self/fd")
    try:
        found = await pod_network.netns_number(path)
    finally:
        assert os.listdir("/proc/self/fd") == before
    return found, [(kind, flags) for kind, _, flags in answers.requests]


GET, MAKE = (_GETNSID, 0), (_NEWNSID, NLM_F_ACK)


@pytest.mark.parametrize(
    ("responses", "found", "requests"),
    [
        (([nsid(5)],), 5, [GET]),
        (([nsid(0)],), 0, [GET]),
        (([nsid(-1)], [], [nsid(6)]), 6, [GET, MAKE, GET]),
        (([nsid(-1)], errno.EEXIST, [nsid(6)]), 6, [GET, MAKE, GET]),
        (([nsid(-1)], [], [nsid(-1)]), None, [GET, MAKE, GET]),
        (([nsid(-1)], errno.EINVAL), None, [GET, MAKE]),
        ((errno.EINVAL,), None, [GET]),
    ],
)
async def test_namespace_without_a_number_gets_one(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    responses: Any,
    found: int | None,
    requests: list[tuple[int, int]],
) -> None:
    (tmp_path / "netns").touch()
    assert await number_of(monkeypatch, str(tmp_path / "netns"), *responses) == (found, requests)


async def test_namespace_that_is_gone_has_no_number(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await number_of(monkeypatch, str(tmp_path / "netns")) == (None, [])


@pytest.mark.parametrize("error", OWN_ERRORS)
async def test_number_is_unknown_where_this_process_lacks_something(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    (tmp_path / "netns").touch()
    with pytest.raises(OSError) as caught:  # noqa: PT011
        await number_of(monkeypatch, str(tmp_path / "netns"), error)
    assert caught.value.errno == error


def test_other_ends_are_sought_for_veths_alone(tmp_path: pathlib.Path) -> None:
    header = struct.pack("=BxHiII", 0, 1, 7, _UP, 0)
    answers = Answers([header + attribute(3, b"veth7\0")], errno.ENODEV, [nsid(5)])
    (tmp_path / "netns").touch()
    links = [LO, ETH0, Link(4, "a", kind="macvlan", peer=7), Link(5, "b", kind="veth"), INNER]
    found = pod_network._other_ends(cast(Exchange, answers), links, str(tmp_path / "netns"))
    assert found == ([(ETH0, Link(7, "veth7")), (INNER, None)], 5)


async def test_interface_exists_on_the_host_or_not() -> None:
    reader = PodNetworkReader()
    assert await reader.exists(1)
    assert not await reader.exists(1 << 30)
