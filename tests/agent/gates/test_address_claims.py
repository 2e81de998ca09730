"""Which claims of a pod are reported, and how often; with routes in memory and fake time."""

import asyncio
import ipaddress
from typing import Any

import pytest

from agent.gates.address_claims import AddressAuthority
from agent.linux.node_routes import NodeRoute, RouteKind
from agent.linux.pod_network import HostInterface, PodNetwork
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims
from agent.pods.store import PodStore
from bpf.abi import IPAddress
from probes.netns import Netns

pytestmark = pytest.mark.looptime

POD = Pod(uid="web", namespace="demo", name="web")
NETNS = Netns("/run/netns/web", 4, 1001)
OWN = "198.18.0.1"
BRIDGE = 50


class Routes:
    """The node has one address of its own, and a bridge with a subnet and without neighbours."""

    def __init__(self) -> None:
        self.solicited: list[IPAddress] = []

    async def route_to(self, address: IPAddress) -> NodeRoute:
        if str(address) == OWN:
            return NodeRoute(RouteKind.OWN)
        if str(address).startswith("198.18.2."):
            return NodeRoute(RouteKind.SENT, BRIDGE)
        return NodeRoute(RouteKind.NONE)

    async def bridge_port_of(self, address: IPAddress, bridge: int) -> int | None:
        return None

    async def solicit(self, address: IPAddress, ifindex: int) -> None:
        self.solicited.append(address)


class Claimant:
    """One pod, and the authority that checks it."""

    def __init__(self) -> None:
        self.routes = Routes()
        routes: Any = self.routes
        self.authority = AddressAuthority(PodStore(Conditions()), routes)

    async def check(self, *addresses: str) -> AddressClaims:
        network = PodNetwork(
            (HostInterface(7, "veth7", BRIDGE),),
            tuple(map(ipaddress.ip_address, addresses)),
            (),
            nsid=1,
        )
        return await self.authority.check(POD, NETNS, network)

    async def settled(self, *addresses: str) -> AddressClaims:
        """The claims once they are no longer new."""
        await self.check(*addresses)
        await asyncio.sleep(6)
        return await self.check(*addresses)

    async def is_reported(self, *addresses: str) -> bool:
        return self.authority.is_due(POD.uid, await self.settled(*addresses))


async def test_the_same_problem_is_reported_once() -> None:
    claimant = Claimant()
    assert await claimant.is_reported("192.0.2.1")
    for _ in range(20):
        assert not await claimant.is_reported("192.0.2.1")


async def test_a_pod_that_keeps_changing_is_reported_ever_more_rarely() -> None:
    claimant = Claimant()
    reported = [
        number for number in range(600) if await claimant.is_reported(f"192.0.2.{number % 250}")
    ]
    # One hour: after 1, 2, 4, 8, 16 and 32 minutes.
    assert len(reported) <= 7
    assert reported[:3] == [0, 10, 30]


async def test_another_kind_of_problem_is_reported_at_once() -> None:
    claimant = Claimant()
    assert await claimant.is_reported("192.0.2.1")
    assert not await claimant.is_reported("192.0.2.2")
    assert await claimant.is_reported("192.0.2.2", OWN)
    assert not await claimant.is_reported("192.0.2.3", OWN)


async def test_a_change_that_was_not_reported_is_reported_later() -> None:
    claimant = Claimant()
    assert await claimant.is_reported("192.0.2.1")
    assert not await claimant.is_reported("192.0.2.2")
    await asyncio.sleep(60)
    assert await claimant.is_reported("192.0.2.2")


async def test_new_neighbours_are_waited_for_together() -> None:
    """64 addresses that no neighbour has cost one wait, not 64."""
    claimant = Claimant()
    started = asyncio.get_running_loop().time()
    found = await claimant.check(*(f"198.18.2.{number}" for number in range(1, 65)))
    assert asyncio.get_running_loop().time() - started < 0.1
    assert len(found.unconfirmed) == len(set(claimant.routes.solicited)) == 64
