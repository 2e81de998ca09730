"""kube-proxy's cases of the cache of slices, on the published message.

kube-proxy's map has all endpoints, as a client gets them that requests all with details.
"""

import dataclasses

import pytest

from agent.services.api import objects
from tests.agent.api.upstream import endpoint_slices
from tests.agent.api.upstream import node as nodes
from tests.agent.api.upstream.endpoint_slices import Published, at_port, published, words
from tests.agent.api.upstream.families import IPV4, Family, both
from tests.agent.api.upstream.inventory import UpstreamFile

pytestmark = pytest.mark.looptime

UPSTREAM = UpstreamFile("pkg/proxy/endpointslicecache_test.go")


@dataclasses.dataclass(frozen=True)
class Cached:
    """Slices in the order in which they are set; two may have one name."""

    slices: tuple[tuple[str, str], ...]
    expected: Published


def overlapping(first: str, second: str, expected: str) -> Cached:
    """One slice, and another version of it."""
    return Cached(
        (("ns1/svc1-1", f"{first} : port-0/80"), ("ns1/svc1-1", f"{second} : port-0/80")),
        {"ns1/svc1:port-0": at_port(expected, 80)},
    )


_DUPLICATES = Cached(
    (("ns1/svc1-1", "1.1 *1.2 : port-0/80"), ("ns1/svc1-2", "1.1 *1.2 : port-0/8080")),
    {"ns1/svc1:port-0": "1.1:80 *1.2:80 1.1:8080 *1.2:8080"},
)
_FIRST = "1.1 1.2 1.3! 1.4 1.5 1.6! 1.7 1.8 1.9! 1.10"
_SECOND = "1.1 1.2 1.3 1.4 1.5 1.6! 1.7 1.8 1.9 1.10"
_ALL_UNREADY = "1.1! 1.2! 1.3! 1.4! 1.5! 1.6! 1.7! 1.8! 1.9! 1.10!"

MAPS = {
    "1 slice, 2 hosts, ports 80,443": Cached(
        (("ns1/svc1-1", "1.1 *1.2 1.3 : port-0/80 port-1/443"),),
        {
            "ns1/svc1:port-0": "1.1:80 *1.2:80 1.3:80",
            "ns1/svc1:port-1": "1.1:443 *1.2:443 1.3:443",
        },
    ),
    "2 slices, same port": Cached(
        (("ns1/svc1-1", "1.1 1.2 1.3 : port-0/80"), ("ns1/svc1-2", "2.1 2.2 2.3 : port-0/80")),
        {"ns1/svc1:port-0": "1.1:80 1.2:80 1.3:80 2.1:80 2.2:80 2.3:80"},
    ),
    "2 overlapping slices, same port": overlapping(
        "1.1 1.2 1.3", "1.1 1.2 1.3 1.4", "1.1 1.2 1.3 1.4"
    ),
    "2 slices, overlapping endpoints, some endpoints unready in 1 or both": overlapping(
        _FIRST, _SECOND, _SECOND
    ),
    "2 slices, overlapping endpoints, some endpoints unready and some endpoints terminating": (
        overlapping(
            _FIRST.replace("1.5", "1.5~").replace("1.10", "1.10~"),
            _SECOND.replace("1.5", "1.5~").replace("1.10", "1.10~"),
            _SECOND.replace("1.5", "1.5~").replace("1.10", "1.10~"),
        )
    ),
    "2 slices, overlapping endpoints, all unready": overlapping(
        _ALL_UNREADY, _ALL_UNREADY, _ALL_UNREADY
    ),
    "3 slices with different services and namespaces": Cached(
        (
            ("ns1/svc1-1", "1.1 1.2 1.3 : port-0/80"),
            ("ns1/svc2-2", "2.1 2.2 2.3 : port-0/80"),
            ("ns2/svc1-3", "3.1 3.2 3.3 : port-0/80"),
        ),
        {
            "ns1/svc1:port-0": "1.1:80 1.2:80 1.3:80",
            "ns1/svc2:port-0": "2.1:80 2.2:80 2.3:80",
            "ns2/svc1:port-0": "3.1:80 3.2:80 3.3:80",
        },
    ),
    "Nil port should not break anything": Cached((("ns1/svc1-1", "1.1 *1.2 1.3 : port-0/"),), {}),
    "Different endpoints with duplicate IPs should not be filtered": _DUPLICATES,
}

BY_PORT = {
    "simple use case with 3 endpoints": Cached(
        (("ns1/svc1-1", "1.1 *1.2 1.3 : port-0/80"),),
        {"ns1/svc1:port-0": "1.1:80 *1.2:80 1.3:80"},
    ),
    "4 different slices with duplicate IPs": _DUPLICATES,
    "with duplicate Endpoints, prefer non-terminating": Cached(
        (("ns1/svc1-1", "*1.1~ *1.1 *1.1~! : port-0/80"),), {"ns1/svc1:port-0": "*1.1:80"}
    ),
}


@both
@UPSTREAM.table("TestEndpointsMapFromESC", MAPS)
async def test_endpoints_map_from_esc(case: Cached, family: Family) -> None:
    await _check(case, family)
    # The same of two slices that both exist, as while endpoints move from one to the other.
    names = [f"{name}{index}" for index, (name, _) in enumerate(case.slices)]
    slices = zip(names, (text for _, text in case.slices), strict=True)
    await _check(dataclasses.replace(case, slices=tuple(slices)), family)


@both
@UPSTREAM.table("TestEndpointInfoByServicePort", BY_PORT)
async def test_endpoint_info_by_service_port(case: Cached, family: Family) -> None:
    await _check(case, family)


async def _check(case: Cached, family: Family) -> None:
    slices = [
        endpoint_slices.endpoint_slice(name, text, family, protocol="TCP")
        for name, text in case.slices
    ]
    current: dict[str, objects.EndpointSlice] = {}
    async with nodes.proxied() as node:
        for service in endpoint_slices.services(slices, family):
            node.set_service(None, service)
        for one in slices:
            node.set_slice(current.get(one.metadata.name), one)
            current[one.metadata.name] = one
        assert published(await node.sync()) == words(case.expected)


@dataclasses.dataclass(frozen=True)
class Versions:
    """Two versions of a slice. kube-proxy handles any difference between them; podgate makes a
    revision only where this node's result differs: see `is_new`."""

    initial: str
    updated: str
    is_new: bool


DATA = {
    "identical slices, ports only": Versions(": http/80", ": http/80", is_new=False),
    "identical slices, ports out of order": Versions(
        ": https/443 http/80", ": http/80 https/443", is_new=False
    ),
    # Ports without endpoints.
    "port removed": Versions(": https/443 http/80", ": https/443", is_new=False),
    "port added": Versions(": https/443", ": https/443 http/80", is_new=False),
    "identical with endpoints": Versions(
        "1.0 1.1 : https/443", "1.0 1.1 : https/443", is_new=False
    ),
    "identical with endpoints out of order": Versions(
        "1.0 1.1 : https/443", "1.1 1.0 : https/443", is_new=False
    ),
    "identical with endpoint added": Versions(
        "1.0 : https/443", "1.1 1.0 : https/443", is_new=True
    ),
}


@both
@UPSTREAM.table("TestEsDataChanged", DATA)
async def test_es_data_changed(case: Versions, family: Family) -> None:
    initial, updated = (
        endpoint_slices.endpoint_slice("bar/svc1-foo", text, family, protocol="TCP")
        for text in (case.initial, case.updated)
    )
    async with nodes.proxied() as node:
        for service in endpoint_slices.services([initial, updated], family):
            node.set_service(None, service)
        node.set_slice(None, initial)
        await node.sync()
        node.set_slice(initial, updated)
        assert bool((await node.sync()).changed) is case.is_new


CLEARED = {
    "one endpoint slice": ("ns1/ep1-1",),
    "two endpoint slices, same namespace": ("ns1/ep1-1", "ns1/ep2-2"),
    "two endpoint slices, same service": ("ns1/ep1-1", "ns1/ep1-2"),
    "two endpoint slices, different namespace": ("ns1/ep1-1", "ns2/ep1-2"),
}


@UPSTREAM.table("TestEndpointSliceCacheClearedCorrectly", CLEARED)
async def test_endpoint_slice_cache_cleared_correctly(case: tuple[str, ...]) -> None:
    slices = [endpoint_slices.endpoint_slice(name, "*1.1 : n1/11", IPV4) for name in case]
    async with nodes.proxied() as node:
        for one in slices:
            node.set_slice(None, one)
        await node.sync()
        assert node.kept
        for one in slices:
            node.set_slice(one, None)
        await node.sync()
        assert not node.kept


@UPSTREAM.single("TestSameServiceEndpointSliceCacheClearedCorrectly")
async def test_same_service_endpoint_slice_cache_cleared_correctly() -> None:
    slices = [
        endpoint_slices.endpoint_slice(name, "*1.1 : n1/11", IPV4)
        for name in ("ns1/svc1-1", "ns1/svc1-2")
    ]
    async with nodes.proxied() as node:
        for one in slices:
            node.set_slice(None, one)
        await node.sync()
        node.set_slice(slices[0], None)
        await node.sync()
        assert node.kept == 1
