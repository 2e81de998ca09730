"""Frames of the host that reenter by VLAN and ipvlan interfaces: they count as sent by the host."""

import contextlib
from collections.abc import Iterator

import pytest

from bpf import loader, pins
from tests.kernel import frames, links, wire
from tests.kernel.guarded import PodState
from tests.kernel.test_bypass_reentry import (
    VERSIONS,
    MakeWay,
    Way,
    expect_stamped,
    watched,  # noqa: F401
)

pytestmark = pytest.mark.kernel

_VLAN = 7


@contextlib.contextmanager
def _vlans() -> Iterator[tuple[str, str, str]]:
    """A pair, with a VLAN interface on each end: the first end and both VLAN interfaces."""
    with links.pair() as ends:
        for end in ends:
            links.ip(
                f"link add link {end} name {end}.{_VLAN} type vlan id {_VLAN}",
                f"link set {end}.{_VLAN} up",
            )
        one, other = ends
        yield one, f"{one}.{_VLAN}", f"{other}.{_VLAN}"


@contextlib.contextmanager
def _by_vlan() -> Iterator[Way]:
    with _vlans() as (_, one, other), links.packet_socket(one) as sock:
        yield Way(other, links.mac_of(other), lambda frame: wire.send(sock, frame), one)


@contextlib.contextmanager
def _by_vlan_below() -> Iterator[Way]:
    """The VLAN interface has no program of its own: the pair stamps tagged frames."""
    with _vlans() as (lower, one, other), links.packet_socket(one) as sock:
        yield Way(other, links.mac_of(other), lambda frame: wire.send(sock, frame), lower)


@contextlib.contextmanager
def _by_ipvlan() -> Iterator[Way]:
    """The frame is for no address of an ipvlan interface, so it comes in by the pair's end."""
    with links.pair() as (one, other), _ipvlan(one) as upper, links.packet_socket(upper) as sock:
        yield Way(other, links.mac_of(other), lambda frame: wire.send(sock, frame), upper)


@contextlib.contextmanager
def _by_ipvlan_back() -> Iterator[Way]:
    """To the MAC address that it comes from: the interface below receives it."""
    with links.pair() as (lower, _), _ipvlan(lower) as upper, links.packet_socket(upper) as sock:
        mac = links.mac_of(lower)
        yield Way(lower, mac, lambda frame: wire.send(sock, mac + mac + frame[12:]), upper)


@contextlib.contextmanager
def _ipvlan(lower: str) -> Iterator[str]:
    links.ip(f"link add link {lower} name ipvl-pg type ipvlan mode l2", "link set ipvl-pg up")
    yield "ipvl-pg"


WAYS = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=way.__name__.removeprefix("_by_").replace("_", "-"))
        for way in (_by_vlan, _by_vlan_below, _by_ipvlan, _by_ipvlan_back)
    ],
)


@WAYS
@VERSIONS
@pytest.mark.parametrize("flags", [frames.SYN, frames.ACK], ids=["syn", "ack"])
def test_frame_that_reenters_by_a_stacked_interface_counts_as_of_the_host(
    watched: PodState,  # noqa: F811
    loaded: loader.Loaded,
    installation: pins.Pins,
    way: MakeWay,
    version: int,
    flags: int,
) -> None:
    expect_stamped(watched, loaded, installation, way, version=version, flags=flags)
