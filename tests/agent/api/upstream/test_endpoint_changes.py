"""kube-proxy's cases of the endpoints change tracker, on the published message and the frontends.

kube-proxy's map has all endpoints, as a client gets them that requests all with details.
"""

import dataclasses

import pytest

from tests.agent.api.upstream import endpoint_slices
from tests.agent.api.upstream import node as nodes
from tests.agent.api.upstream.endpoint_slices import Published, published, words
from tests.agent.api.upstream.families import Family, both
from tests.agent.api.upstream.inventory import UpstreamFile

pytestmark = pytest.mark.looptime

UPSTREAM = UpstreamFile("pkg/proxy/endpointschangetracker_test.go")
UPSTREAM.none(
    "podgate publishes no time of the change that led to an endpoint: its revisions have no "
    "counterpart of kube-proxy's metric of the time to program the network",
    "TestLastChangeTriggerTime",
)

Slices = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Local:
    """Slices, and the addresses of each service that are on this node and ready."""

    slices: Slices
    expected: dict[str, set[str]]


LOCAL = {
    "Case[0]: nothing": Local({}, {}),
    "Case[1]: unnamed port": Local({"ns1/ep1-1": "1.1 : /11"}, {}),
    "Case[2]: unnamed port local": Local({"ns1/ep1-1": "*1.1 : /11"}, {"ns1/ep1": {"1.1"}}),
    "Case[3]: named local and non-local ports for the same IP.": Local(
        {"ns1/ep1-1": "1.1 *1.2 : p11/11 p12/12"}, {"ns1/ep1": {"1.2"}}
    ),
    "Case[4]: named local and non-local ports for different IPs.": Local(
        {
            "ns1/ep1-1": "1.1 : p11/11",
            "ns2/ep2-1": "*2.2 *2.22 : p22/22",
            "ns2/ep2-2": "*2.3 : p23/23",
            "ns4/ep4-1": "*4.4 4.5 : p44/44",
            "ns4/ep4-2": "*4.6 : p45/45",
        },
        {"ns2/ep2": {"2.2", "2.22", "2.3"}, "ns4/ep4": {"4.4", "4.6"}},
    ),
    "Case[5]: named local and non-local ports for different IPs, some not ready.": Local(
        {
            "ns1/ep1-1": "1.1 : p11/11",
            "ns2/ep2-1": "*2.2 *2.22 : p22/22",
            "ns2/ep2-2": "*2.3~ : p23/23",
            "ns4/ep4-1": "*4.4 4.5 : p44/44",
            "ns4/ep4-2": "*4.6 : p45/45",
        },
        {"ns2/ep2": {"2.2", "2.22"}, "ns4/ep4": {"4.4", "4.6"}},
    ),
    "Case[6]: all endpoints are terminating,, so getLocalReadyEndpointIPs should return 0 ready "
    "endpoints": Local(
        {
            "ns1/ep1-1": "1.1~ : p11/11",
            "ns2/ep2-1": "*2.2~ *2.22~ : p22/22",
            "ns2/ep2-2": "*2.3~ : p23/23",
            "ns4/ep4-1": "*4.4~ 4.5~ : p44/44",
            "ns4/ep4-2": "*4.6~ : p45/45",
        },
        {},
    ),
}


@both
@UPSTREAM.table("TestGetLocalEndpointIPs", LOCAL)
async def test_get_local_endpoint_ips(case: Local, family: Family) -> None:
    slices = [
        endpoint_slices.endpoint_slice(name, text, family) for name, text in case.slices.items()
    ]
    async with nodes.proxied() as node:
        for service in endpoint_slices.services(slices, family):
            node.set_service(None, service)
        for one in slices:
            node.set_slice(None, one)
        assert _local_ready(await node.sync()) == case.expected


def _local_ready(synced: nodes.Synced) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for port, endpoints in published(synced).items():
        ready = {word for word in endpoints if word[0] == "*" and word[-1].isdigit()}
        if own := {word.strip("*").split(":")[0] for word in ready}:
            found.setdefault(port.rpartition(":")[0], set()).update(own)
    return found


@dataclasses.dataclass(frozen=True)
class Update:
    """A change of slices. local: addresses that are on this node and ready, by service."""

    before: Slices = dataclasses.field(default_factory=dict)
    after: Slices = dataclasses.field(default_factory=dict)
    was: Published = dataclasses.field(default_factory=dict)
    expected: Published = dataclasses.field(default_factory=dict)
    changed: set[str] = dataclasses.field(default_factory=set)
    local: dict[str, int] = dataclasses.field(default_factory=dict)


def unchanged(slices: Slices, expected: Published, local: dict[str, int]) -> Update:
    return Update(slices, slices, expected, expected, set(), local)


UPDATES = {
    "empty": Update(),
    "no change, unnamed port": unchanged({"ns1/ep1-1": "1.1 : /11"}, {"ns1/ep1:": "1.1:11"}, {}),
    "no change, named port, local": unchanged(
        {"ns1/ep1-1": "*1.1 : p11/11"}, {"ns1/ep1:p11": "*1.1:11"}, {"ns1/ep1": 1}
    ),
    "no change, multiple slices": unchanged(
        {"ns1/ep1-1": "1.1 : p11/11", "ns1/ep1-2": "1.2 : p12/12"},
        {"ns1/ep1:p11": "1.1:11", "ns1/ep1:p12": "1.2:12"},
        {},
    ),
    "no change, multiple slices, multiple ports, local": unchanged(
        {"ns1/ep1-1": "*1.1 : p11/11 p12/12", "ns1/ep1-2": "1.3 : p13/13"},
        {"ns1/ep1:p11": "*1.1:11", "ns1/ep1:p12": "*1.1:12", "ns1/ep1:p13": "1.3:13"},
        {"ns1/ep1": 1},
    ),
    "no change, multiple services, slices, IPs, and ports": unchanged(
        {
            "ns1/ep1-1": "1.1 *1.2 : p11/11 p12/12",
            "ns1/ep1-2": "1.3 *1.4 : p13/13 p14/14",
            "ns2/ep2-1": "2.1 *2.2 : p21/21 p22/22",
        },
        {
            "ns1/ep1:p11": "1.1:11 *1.2:11",
            "ns1/ep1:p12": "1.1:12 *1.2:12",
            "ns1/ep1:p13": "1.3:13 *1.4:13",
            "ns1/ep1:p14": "1.3:14 *1.4:14",
            "ns2/ep2:p21": "2.1:21 *2.2:21",
            "ns2/ep2:p22": "2.1:22 *2.2:22",
        },
        {"ns1/ep1": 2, "ns2/ep2": 1},
    ),
    "add an EndpointSlice": Update(
        after={"ns1/ep1-1": "*1.1 : /11"},
        expected={"ns1/ep1:": "*1.1:11"},
        changed={"ns1/ep1"},
        local={"ns1/ep1": 1},
    ),
    "remove an EndpointSlice": Update(
        before={"ns1/ep1-1": "*1.1 : /11"}, was={"ns1/ep1:": "*1.1:11"}, changed={"ns1/ep1"}
    ),
    "add an IP and port": Update(
        before={"ns1/ep1-1": "1.1 : p11/11"},
        after={"ns1/ep1-1": "1.1 *1.2 : p11/11 p12/12"},
        was={"ns1/ep1:p11": "1.1:11"},
        expected={"ns1/ep1:p11": "1.1:11 *1.2:11", "ns1/ep1:p12": "1.1:12 *1.2:12"},
        changed={"ns1/ep1"},
        local={"ns1/ep1": 1},
    ),
    "remove an IP and port": Update(
        before={"ns1/ep1-1": "1.1 *1.2 : p11/11 p12/12"},
        after={"ns1/ep1-1": "1.1 : p11/11"},
        was={"ns1/ep1:p11": "1.1:11 *1.2:11", "ns1/ep1:p12": "1.1:12 *1.2:12"},
        expected={"ns1/ep1:p11": "1.1:11"},
        changed={"ns1/ep1"},
    ),
    "add a slice to an endpoint": Update(
        before={"ns1/ep1-1": "1.1 : p11/11"},
        after={"ns1/ep1-1": "1.1 : p11/11", "ns1/ep1-2": "*1.2 : p12/12"},
        was={"ns1/ep1:p11": "1.1:11"},
        expected={"ns1/ep1:p11": "1.1:11", "ns1/ep1:p12": "*1.2:12"},
        changed={"ns1/ep1"},
        local={"ns1/ep1": 1},
    ),
    "remove a slice from an endpoint": Update(
        before={"ns1/ep1-1": "1.1 : p11/11", "ns1/ep1-2": "1.2 : p12/12"},
        after={"ns1/ep1-1": "1.1 : p11/11"},
        was={"ns1/ep1:p11": "1.1:11", "ns1/ep1:p12": "1.2:12"},
        expected={"ns1/ep1:p11": "1.1:11"},
        changed={"ns1/ep1"},
    ),
    "rename a port": Update(
        before={"ns1/ep1-1": "1.1 : p11/11"},
        after={"ns1/ep1-1": "1.1 : p11-2/11"},
        was={"ns1/ep1:p11": "1.1:11"},
        expected={"ns1/ep1:p11-2": "1.1:11"},
        changed={"ns1/ep1"},
    ),
    "renumber a port": Update(
        before={"ns1/ep1-1": "1.1 : p11/11"},
        after={"ns1/ep1-1": "1.1 : p11/22"},
        was={"ns1/ep1:p11": "1.1:11"},
        expected={"ns1/ep1:p11": "1.1:22"},
        changed={"ns1/ep1"},
    ),
    "complex add and remove": Update(
        before={
            "ns1/ep1-1": "1.1 : p11/11",
            "ns2/ep2-1": "*2.2 *2.22 : p22/22",
            "ns2/ep2-2": "*2.3 : p23/23",
            "ns4/ep4-1": "*4.4 *4.5 : p44/44",
            "ns4/ep4-2": "*4.6 : p45/45",
        },
        after={
            "ns1/ep1-1": "1.1 1.11 : p11/11",
            "ns1/ep1-2": "1.2 : p12/12 p122/122",
            "ns3/ep3-1": "3.3 : p33/33",
            "ns4/ep4-1": "*4.4 : p44/44",
        },
        was={
            "ns1/ep1:p11": "1.1:11",
            "ns2/ep2:p22": "*2.22:22 *2.2:22",
            "ns2/ep2:p23": "*2.3:23",
            "ns4/ep4:p44": "*4.4:44 *4.5:44",
            "ns4/ep4:p45": "*4.6:45",
        },
        expected={
            "ns1/ep1:p11": "1.11:11 1.1:11",
            "ns1/ep1:p12": "1.2:12",
            "ns1/ep1:p122": "1.2:122",
            "ns3/ep3:p33": "3.3:33",
            "ns4/ep4:p44": "*4.4:44",
        },
        changed={"ns1/ep1", "ns2/ep2", "ns3/ep3", "ns4/ep4"},
        local={"ns4/ep4": 1},
    ),
    "change from 0 endpoint address to 1 unnamed port": Update(
        before={"ns1/ep1-1": ""},
        after={"ns1/ep1-1": "1.1 : /11"},
        expected={"ns1/ep1:": "1.1:11"},
        changed={"ns1/ep1"},
    ),
    "change from ready to terminating pod": Update(
        before={"ns1/ep1-1": "1.1 : /11"},
        after={"ns1/ep1-1": "1.1~ : /11"},
        was={"ns1/ep1:": "1.1:11"},
        expected={"ns1/ep1:": "1.1:11~"},
        changed={"ns1/ep1"},
    ),
    "change from terminating to empty pod": Update(
        before={"ns1/ep1-1": "1.1~ : /11"},
        after={"ns1/ep1-1": ""},
        was={"ns1/ep1:": "1.1:11~"},
        changed={"ns1/ep1"},
    ),
}


@both
@UPSTREAM.table("TestUpdateEndpointsMap", UPDATES)
async def test_update_endpoints_map(case: Update, family: Family) -> None:
    before, after = (
        {name: endpoint_slices.endpoint_slice(name, text, family) for name, text in slices.items()}
        for slices in (case.before, case.after)
    )
    async with nodes.proxied() as node:
        for service in endpoint_slices.services([*before.values(), *after.values()], family):
            node.set_service(None, service)
        for one in before.values():
            node.set_slice(None, one)
        assert published(await node.sync()) == words(case.was)
        for name in before | after:
            node.set_slice(before.get(name), after.get(name))
        synced = await node.sync()
    assert published(synced) == words(case.expected)
    assert synced.changed == case.changed
    local = {name: len(own) for name, own in _local_ready(synced).items()}
    assert local == case.local
    # Where kube-proxy clears connection tracking, the proxies get a change (all ports are UDP), but
    # for one that stays in use while it terminates: kube-proxy keeps its flows, too.
    is_same = _addresses(case.was) == _addresses(case.expected)
    assert bool(synced.frontends.changed) is not is_same


def _addresses(found: Published) -> dict[str, set[str]]:
    return {port: {word.strip("*~!") for word in text.split()} for port, text in found.items()}


BOTH_PORTS = "port-0/80 port-1/443"


@dataclasses.dataclass(frozen=True)
class SliceUpdate:
    """Slices of one service by number, and one that is set or removed. expected: None where
    nothing changes."""

    before: dict[int, str]
    number: int
    slice: str
    expected: str | None
    ports: str = BOTH_PORTS
    fewer: str = ""
    """What is expected of the second port, if other than `expected`."""
    is_removed: bool = False
    kind: str = ""


SLICE_UPDATES = {
    "add a simple slice that doesn't already exist": SliceUpdate(
        {}, 1, "1.1 *1.2 1.3", "1.1 *1.2 1.3"
    ),
    "add the same slice that already exists": SliceUpdate(
        {1: "1.1 *1.2 1.3"}, 1, "1.1 *1.2 1.3", None
    ),
    "add an FQDN slice (invalid address type)": SliceUpdate(
        {1: "1.1 *1.2 1.3"}, 2, "*2.1 *2.2 *2.3 *2.4 *2.5", None, kind="FQDN"
    ),
    "add a slice that overlaps with existing state": SliceUpdate(
        {1: "1.1 *1.2 1.3", 2: "2.1 *2.2"},
        1,
        "*1.1 *1.2 *1.3 *1.4 *1.5",
        "*1.1 *1.2 *1.3 *1.4 *1.5 2.1 *2.2",
    ),
    "add a slice that overlaps with existing state and partial ports": SliceUpdate(
        {1: "*1.1 *1.2 *1.3", 2: "*2.1 *2.2"},
        3,
        "*1.1 *1.2 *1.3 *1.4 *1.5",
        "*1.1 *1.2 *1.3 *1.4 *1.5 *2.1 *2.2",
        ports="port-0/80",
        fewer="*1.1 *1.2 *1.3 *2.1 *2.2",
    ),
    "remove a slice that overlaps with existing state": SliceUpdate(
        {1: "1.1 *1.2 1.3", 2: "2.1 *2.2"},
        1,
        "*1.1 *1.2 *1.3 *1.4 *1.5",
        "2.1 *2.2",
        is_removed=True,
    ),
    "remove a slice that doesn't even exist in current state": SliceUpdate(
        {1: "*1.1 *1.2 *1.3 *1.4 *1.5", 2: "*2.1 *2.2"},
        3,
        "*3.1 *3.2 *3.3 *3.4 *3.5",
        None,
        is_removed=True,
    ),
    "transition all endpoints to unready state": SliceUpdate(
        {1: "1.1 *1.2 1.3"}, 1, "*1.1! *1.2! *1.3!", "*1.1! *1.2! *1.3!"
    ),
    "transition all endpoints to ready state": SliceUpdate(
        {1: "1.1! *1.2!"}, 1, "*1.1 *1.2", "*1.1 *1.2"
    ),
    "transition some endpoints to ready state": SliceUpdate(
        {1: "*1.1 *1.2! *1.3", 2: "*2.1 *2.2!"},
        1,
        "*1.1 *1.2 *1.3!",
        "*1.1 *1.2 *1.3! *2.1 *2.2!",
    ),
    "transition some endpoints to terminating state": SliceUpdate(
        {1: "*1.1 *1.2~! *1.3", 2: "*2.1 *2.2~!"},
        1,
        "*1.1 *1.2~ *1.3!",
        "*1.1 *1.2~ *1.3! *2.1 *2.2~!",
    ),
}


@both
@UPSTREAM.table("TestEndpointSliceUpdate", SLICE_UPDATES)
async def test_endpoint_slice_update(case: SliceUpdate, family: Family) -> None:
    before = {
        number: endpoint_slices.endpoint_slice(
            f"ns1/svc1-{number}", f"{text} : {BOTH_PORTS}", family, protocol="TCP"
        )
        for number, text in case.before.items()
    }
    new = endpoint_slices.endpoint_slice(
        f"ns1/svc1-{case.number}",
        f"{case.slice} : {case.ports}",
        family,
        protocol="TCP",
        kind=case.kind,
    )
    old = before.get(case.number)
    async with nodes.proxied() as node:
        for service in endpoint_slices.services([*before.values(), new], family):
            node.set_service(None, service)
        for one in before.values():
            node.set_slice(None, one)
        initial = published(await node.sync())
        if case.is_removed:
            node.set_slice(old or new, None)
        else:
            node.set_slice(old, new)
        synced = await node.sync()
    found = published(synced)
    if case.expected is None:
        assert found == initial
        assert not synced.changed
        return
    assert found == words(
        {
            "ns1/svc1:port-0": endpoint_slices.at_port(case.expected, 80),
            "ns1/svc1:port-1": endpoint_slices.at_port(case.fewer or case.expected, 443),
        }
    )
    assert synced.changed == {"ns1/svc1"}


@dataclasses.dataclass(frozen=True)
class Checkout:
    """One slice, then another version of it: what is published before and after."""

    applied: str
    pending: str
    previous: Published
    current: Published


CHECKOUTS = {
    "empty slices": Checkout("", "", {}, {}),
    "adding initial slice": Checkout(
        "", "1.1 1.2~ 1.3! : port-0/80", {}, {"ns1/svc1:port-0": "1.1:80 1.2:80~ 1.3:80!"}
    ),
    "removing port in update": Checkout(
        "1.1 1.2 1.3! : port-0/80 port-1/443",
        "1.1 1.2 1.3! : port-0/80",
        {
            "ns1/svc1:port-0": "1.1:80 1.2:80 1.3:80!",
            "ns1/svc1:port-1": "1.1:443 1.2:443 1.3:443!",
        },
        {"ns1/svc1:port-0": "1.1:80 1.2:80 1.3:80!"},
    ),
}


@both
@UPSTREAM.table("TestCheckoutChanges", CHECKOUTS)
async def test_checkout_changes(case: Checkout, family: Family) -> None:
    versions = [
        endpoint_slices.endpoint_slice("ns1/svc1-1", text, family, protocol="TCP") if text else None
        for text in (case.applied, case.pending)
    ]
    async with nodes.proxied() as node:
        given = [version for version in versions if version]
        for service in endpoint_slices.services(given, family):
            node.set_service(None, service)
        old = None
        for version, expected in zip(versions, (case.previous, case.current), strict=True):
            node.set_slice(old, version)
            old = version
            synced = await node.sync()
            assert published(synced) == words(expected)
    assert bool(synced.changed) is (case.previous != case.current)
