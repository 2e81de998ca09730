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
VETH = 7


class Routes:
    """The node has one address of its own, and a bridge with a subnet and without neighbours."""

    def __init__(self) -> None:
        self.solicited: list[IPAddress] = []
        self.ports: dict[str, int] = {}
        """The bridge's neighbours, by their address."""

    async def route_to(self, address: IPAddress) -> NodeRoute:
        if str(address) == OWN:
            return NodeRoute(RouteKind.OWN)
        if str(address).startswith("198.18.2."):
            return NodeRoute(RouteKind.SENT, BRIDGE)
        if str(address).startswith("198.18.3."):
            return NodeRoute(RouteKind.SENT, VETH)
        if str(address).startswith("198.18.4."):
            return NodeRoute(RouteKind.SENT, 60)
        return NodeRoute(RouteKind.NONE)

    async def bridge_port_of(self, address: IPAddress, bridge: int) -> int | None:
        assert bridge == BRIDGE
        return self.ports.get(str(address))

    async def solicit(self, address: IPAddress, ifindex: int) -> None:
        self.solicited.append(address)


class Claimant:
    """One pod, and the authority that checks it."""

    def __init__(self) -> None:
        self.routes = Routes()
        routes: Any = self.routes
        self.store = PodStore(Conditions())
        self.authority = AddressAuthority(self.store, routes)
        self.pod, self.netns = POD, NETNS

    def report(self, name: str, *addresses: str, **fields: Any) -> Pod:
        """The runtime reports these addresses of a pod."""
        found = tuple(map(ipaddress.ip_address, addresses))
        pod = Pod(uid=name, namespace="demo", name=name, reported_addresses=found, **fields)
        self.store.set_pod(pod)
        return pod

    async def check(self, *addresses: str) -> AddressClaims:
        network = PodNetwork(
            (HostInterface(VETH, "veth7", BRIDGE),),
            tuple(map(ipaddress.ip_address, addresses)),
            (),
            nsid=1,
        )
        return await self.authority.check(self.pod, self.netns, network)

    async def settled(self, *addresses: str) -> AddressClaims:
        """The claims once they are no longer new."""
        await self.check(*addresses)
        await asyncio.sleep(6)
        return await self.check(*addresses)

    async def is_reported(self, *addresses: str) -> bool:
        return self.authority.is_due(POD.uid, await self.settled(*addresses))


def why(claims: AddressClaims) -> dict[str, str]:
    return {str(address): text for address, text in claims.unconfirmed.items()}


async def test_address_is_the_pods_if_the_node_sends_it_there() -> None:
    claimant = Claimant()
    claimant.routes.ports = {"198.18.2.1": VETH, "198.18.2.2": 8}
    claims = await claimant.settled(
        *("198.18.3.1", "198.18.2.1", "198.18.2.2", "198.18.2.3", "198.18.4.1", OWN, "192.0.2.1")
    )
    assert claims.texts == ("198.18.3.1", "198.18.2.1")
    assert why(claims) == {
        "198.18.2.2": "behind another port of the node's bridge",
        "198.18.2.3": "not found by the node on its bridge",
        "198.18.4.1": "routed by the node through another interface",
        OWN: "an address of the node",
        "192.0.2.1": "without a route on the node",
    }
    assert not claims.is_settling


async def test_reported_address_is_the_pods_whatever_the_routes_and_never_anothers() -> None:
    claimant = Claimant()
    claimant.pod = claimant.report("web", "192.0.2.1", OWN, "198.18.2.1")
    claimant.report("db", "198.18.3.1", "198.18.3.2")
    claimant.report("cache", "198.18.3.2")
    claimant.report("agent", "198.18.3.3", host_network=True)
    claimant.routes.ports = {"198.18.2.2": VETH}
    addresses = ("192.0.2.1", OWN, "198.18.2.1", "198.18.2.2")
    routed = ("198.18.3.1", "198.18.3.2", "198.18.3.3")
    claims = await claimant.settled(*addresses, *routed, "fe80::1")
    assert claims.texts == ("192.0.2.1", "198.18.2.1", "198.18.3.3")
    assert why(claims) == {
        OWN: "an address of the node",
        # The runtime has an address on the bridge, so a neighbour shows nothing.
        "198.18.2.2": "routed by the node through another interface",
        "198.18.3.1": "that of pod demo/db",
        "198.18.3.2": "that of pod demo/cache",
    }
    claimant.store.remove_pod("cache")
    claimant.report("db", "198.18.3.1")
    claims = await claimant.check(*routed)
    assert claims.texts == ("198.18.3.2", "198.18.3.3")
    claimant.store.remove_pod("db")
    claims = await claimant.check(*routed)
    assert claims.texts == routed


async def test_confirmed_address_becomes_anothers_when_it_is_reported_for_that() -> None:
    claimant = Claimant()
    assert (await claimant.settled("198.18.3.1")).texts == ("198.18.3.1",)
    claimant.report("db", "198.18.3.1")
    claims = await claimant.check("198.18.3.1")
    assert (claims.texts, why(claims)) == ((), {"198.18.3.1": "that of pod demo/db"})


@pytest.mark.parametrize("is_same", [True, False])
async def test_confirmation_is_of_one_namespace(is_same: bool) -> None:
    """A CNI may change its routes while the namespace lasts."""
    claimant = Claimant()
    claimant.routes.ports = {"198.18.2.1": VETH}
    await claimant.settled("198.18.2.1")
    claimant.routes.ports = {}
    if not is_same:
        claimant.netns = Netns("/run/netns/web", 4, 1002)
    claims = await claimant.check("198.18.2.1")
    assert claims.texts == (("198.18.2.1",) if is_same else ())
    assert claims.is_settling is not is_same


async def test_address_that_was_gone_is_new_again() -> None:
    claimant = Claimant()
    claimant.routes.ports = {"198.18.2.1": VETH}
    await claimant.settled("198.18.2.1")
    await claimant.check()
    claimant.routes.ports = {}
    claims = await claimant.check("198.18.2.1")
    assert (claims.texts, claims.is_settling) == ((), True)


async def test_claims_displace_no_reported_or_confirmed_address() -> None:
    claimant = Claimant()
    await claimant.check("198.18.3.1")
    claimant.pod = claimant.report("web", "203.0.113.1")
    many = [f"192.0.2.{number}" for number in range(1, 100)]
    claims = await claimant.settled(*many, "198.18.3.1", "203.0.113.1", "198.18.3.2")
    assert claims.texts == ("198.18.3.1", "203.0.113.1")
    reasons = list(claims.unconfirmed.values())
    assert reasons.count("without a route on the node") == 62
    assert reasons.count("one of too many") == 38


async def test_neighbour_that_answers_late_is_waited_for_once() -> None:
    claimant = Claimant()

    async def solicit(address: IPAddress, ifindex: int) -> None:
        asyncio.get_running_loop().call_later(
            0.004, claimant.routes.ports.setdefault, str(address), VETH
        )

    claimant.routes.solicit = solicit  # type: ignore[method-assign]
    started = asyncio.get_running_loop().time()
    claims = await claimant.check("198.18.2.1")
    assert (claims.texts, claims.is_settling) == (("198.18.2.1",), False)
    assert asyncio.get_running_loop().time() - started == pytest.approx(0.005)
    started = asyncio.get_running_loop().time()
    await claimant.check("198.18.2.1", "198.18.3.1", OWN, "198.18.4.1")
    assert asyncio.get_running_loop().time() == started


async def test_confirmed_address_stays_until_it_is_anothers() -> None:
    claimant = Claimant()
    claimant.routes.ports = {"198.18.2.1": VETH}
    assert (await claimant.settled("198.18.2.1")).texts == ("198.18.2.1",)
    del claimant.routes.ports["198.18.2.1"]
    assert (await claimant.check("198.18.2.1")).texts == ("198.18.2.1",)
    claimant.routes.ports["198.18.2.1"] = 8
    claims = await claimant.check("198.18.2.1")
    assert claims.texts == ()
    assert why(claims) == {"198.18.2.1": "behind another port of the node's bridge"}


async def test_new_address_may_still_be_confirmed() -> None:
    claimant = Claimant()
    claims = await claimant.check("192.0.2.1")
    assert claims.is_settling
    assert claims.problem == ""


async def test_address_of_no_network_is_no_problem() -> None:
    """Istio's proxy has ::6 in each pod."""
    claimant = Claimant()
    claimant.routes.ports = {"198.18.2.1": VETH}
    claims = await claimant.settled("198.18.2.1", "::6")
    assert why(claims) == {"::6": "without a route on the node"}
    assert claims.problem == ""
    assert not await claimant.is_reported("198.18.2.1", "::6")


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


async def test_address_of_a_pod_that_was_removed_is_new_when_it_comes_back() -> None:
    claimant = Claimant()
    claimant.pod = claimant.report(POD.uid)
    assert not (await claimant.settled("192.0.2.1")).is_settling
    claimant.store.remove_pod(POD.uid)
    await claimant.check()
    assert (await claimant.check("192.0.2.1")).is_settling
