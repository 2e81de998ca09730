"""kube-proxy's cases of the service change tracker, on the published message and the frontends.

kube-proxy runs once for each family, and podgate has both in one message: a case reads the
addresses of its family. A headless service is no proxy's, and podgate publishes it for DNS, without
an address: the proxies have nothing of it.
"""

import dataclasses
from typing import Any

import pytest

from agent.services.api import objects
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.api.upstream import families
from tests.agent.api.upstream import node as nodes
from tests.agent.api.upstream.families import IPV4, IPV6, Family, both
from tests.agent.api.upstream.inventory import UpstreamFile
from tests.agent.services.api import making
from tests.agent.services.api.making import Json

pytestmark = pytest.mark.looptime

UPSTREAM = UpstreamFile("pkg/proxy/servicechangetracker_test.go")


def ports(*texts: str) -> list[Json]:
    """Of "name/protocol/port/node port"."""
    made: list[Json] = []
    for text in texts:
        name, protocol, port, node_port = text.split("/")
        made.append(
            {"name": name, "protocol": protocol, "port": int(port), "nodePort": int(node_port)}
        )
    return made


def ingress(*addresses: str, mode: str | None = None) -> Json:
    return {"loadBalancer": {"ingress": [{"ip": one, "ipMode": mode} for one in addresses]}}


@dataclasses.dataclass(frozen=True)
class Mapped:
    """One service, and what a proxy of a family has of it.

    Addresses are of the test's family; after "~" of the other one. ports: "name/protocol/port" that
    are proxied; none: the service is ignored.
    """

    service: Json | None
    ports: tuple[str, ...] = ()
    external: tuple[str, ...] = ()
    balancers: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    health_check: int = 0
    is_other: bool = False
    """Seen by the proxy of the other family."""


_BALANCER: Json = {
    "type": "LoadBalancer",
    "clusterIP": "198.18.55.11",
    "loadBalancerIP": "198.19.7.8",
    "ports": ports("port3/UDP/8675/30061", "port4/UDP/8676/30062"),
}
_BOTH: Json = {"status": ingress("198.19.8.8", "~198.19.8.9")}
_HEADLESS: Json = {"clusterIP": "None"}
_TEST_PORT = ports("testPort/TCP/12345/0")

_DUAL: Json = {
    "externalIPs": ["198.19.8.8", "~198.19.8.9"],
    "loadBalancerSourceRanges": ["198.18.0.0/16", "~198.19.0.0/16"],
    "ports": _TEST_PORT,
}

CASES = {
    "nothing": Mapped(None),
    "headless service": Mapped(_HEADLESS | {"ports": ports("rpc/UDP/1234/0")}),
    "headless sctp service": Mapped(_HEADLESS | {"ports": ports("sip/SCTP/7777/0")}),
    "headless service without port": Mapped(_HEADLESS | {"ports": None}),
    "cluster ip service": Mapped(
        {"clusterIP": "198.18.55.4", "ports": ports("p1/UDP/1234/4321", "p2/UDP/1235/5321")},
        ("p1/UDP/1234", "p2/UDP/1235"),
    ),
    "nodeport service": Mapped(
        {
            "type": "NodePort",
            "clusterIP": "198.18.55.10",
            "ports": ports("port1/UDP/345/678", "port2/TCP/344/677"),
        },
        ("port1/UDP/345", "port2/TCP/344"),
    ),
    "load balancer service": Mapped(
        _BALANCER | {"status": ingress("198.19.2.4")},
        ("port3/UDP/8675", "port4/UDP/8676"),
        balancers=("198.19.2.4",),
    ),
    "load balancer service ipMode VIP": Mapped(
        _BALANCER | {"status": ingress("198.19.2.4", mode="VIP")},
        ("port3/UDP/8675", "port4/UDP/8676"),
        balancers=("198.19.2.4",),
    ),
    "load balancer service ipMode Proxy": Mapped(
        _BALANCER | {"status": ingress("198.19.2.4", mode="Proxy")},
        ("port3/UDP/8675", "port4/UDP/8676"),
    ),
    "load balancer service with only local traffic policy": Mapped(
        {
            "type": "LoadBalancer",
            "clusterIP": "198.18.55.12",
            "loadBalancerIP": "198.19.7.8",
            "ports": ports("portx/UDP/8677/30063", "porty/UDP/8678/30064"),
            "status": ingress("198.19.2.3"),
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 345,
        },
        ("portx/UDP/8677", "porty/UDP/8678"),
        balancers=("198.19.2.3",),
        health_check=345,
    ),
    "external name service": Mapped(
        {
            "type": "ExternalName",
            "clusterIP": "198.18.55.4",
            "externalName": "foo2.bar.com",
            "ports": ports("portz/UDP/1235/5321"),
        }
    ),
    "service with ipv6 clusterIP under ipv4 mode, service should be filtered": Mapped(
        _BOTH | {"clusterIP": "~198.18.0.1", "ports": _TEST_PORT}
    ),
    "service with ipv4 clusterIP under ipv6 mode, service should be filtered": Mapped(
        _BOTH | {"clusterIP": "198.18.0.1", "ports": _TEST_PORT}, is_other=True
    ),
    # The API server removes a load balancer's status from services of other types, as these are;
    # kube-proxy does not check the type.
    "service with ipv4 configurations under ipv4 mode": Mapped(
        _BOTH
        | {
            "clusterIP": "198.18.0.1",
            "externalIPs": ["198.19.8.8"],
            "loadBalancerSourceRanges": ["198.18.0.0/16"],
            "ports": _TEST_PORT,
        },
        ("testPort/TCP/12345",),
        external=("198.19.8.8",),
        balancers=("198.19.8.8",),
        ranges=("198.18.0.0/16",),
    ),
    "service with ipv6 configurations under ipv6 mode": Mapped(
        _BOTH
        | {
            "clusterIP": "~198.18.0.1",
            "externalIPs": ["~198.19.8.9"],
            "loadBalancerSourceRanges": ["~198.18.0.0/16"],
            "ports": _TEST_PORT,
        },
        ("testPort/TCP/12345",),
        external=("~198.19.8.9",),
        balancers=("~198.19.8.9",),
        ranges=("~198.18.0.0/16",),
        is_other=True,
    ),
    "service with both ipv4 and ipv6 configurations under ipv4 mode, ipv6 fields should be "
    "filtered": Mapped(
        _BOTH | {"clusterIP": "198.18.0.1", **_DUAL},
        ("testPort/TCP/12345",),
        external=("198.19.8.8",),
        balancers=("198.19.8.8",),
        ranges=("198.18.0.0/16",),
    ),
    "service with both ipv4 and ipv6 configurations under ipv6 mode, ipv4 fields should be "
    "filtered": Mapped(
        _BOTH | {"clusterIP": "~198.18.0.1", **_DUAL},
        ("testPort/TCP/12345",),
        external=("~198.19.8.9",),
        balancers=("~198.19.8.9",),
        ranges=("~198.19.0.0/16",),
        is_other=True,
    ),
    "service with extra space in LoadBalancerSourceRanges": Mapped(
        {
            "clusterIP": "198.18.0.1",
            "loadBalancerSourceRanges": [" 198.18.0.0/16"],
            "ports": _TEST_PORT,
        },
        ("testPort/TCP/12345",),
        ranges=("198.18.0.0/16",),
    ),
}


@both
@UPSTREAM.table("TestServiceToServiceMap", CASES)
async def test_service_to_service_map(case: Mapped, family: Family) -> None:
    async with nodes.proxied() as node:
        if case.service is not None:
            node.set_service(None, _service("web", family, case.service))
        synced = await node.sync()
    seen = families.other(family) if case.is_other else family
    assert _mapped(synced, seen) == families.placed(
        dict.fromkeys(case.ports, (case.external, case.balancers, case.ranges, case.health_check)),
        family,
    )
    frontends = {key.address for key in synced.frontends.changed} - {*nodes.NODE_ADDRESSES}
    own = ((case.service or {}).get("clusterIP"), *case.external, *case.balancers)
    assert {str(one) for one in frontends if _is_of(one, seen)} == {
        families.placed(one, family) for one in own if case.ports
    }


def _service(name: str, family: Family, spec: Json) -> objects.ApiService:
    """clusterIP: also as the list that the API server writes."""
    placed = families.placed(spec, family)
    return making.service(name, **placed, clusterIPs=[placed["clusterIP"]])


def _mapped(synced: nodes.Synced, family: Family) -> dict[str, Any]:
    """What the message has for a proxy of this family, by port."""
    found = {}
    for service in synced.services.values():
        if not any(_is_of(one, family) for one in service.cluster_ips):
            continue
        for port in service.ports:
            name = f"{port.name}/{pb.Protocol.Name(port.protocol)[9:]}/{port.port}"
            found[name] = (
                *(
                    tuple(one for one in texts if _is_of(one, family))
                    for texts in (
                        service.external_ips,
                        service.load_balancer_ips,
                        service.load_balancer_source_ranges,
                    )
                ),
                service.health_check_node_port,
            )
    return found


def _is_of(address: Any, family: Family) -> bool:
    return (":" in str(address)) is (family is IPV6)


_HEADLESS_SERVICES = {
    "headless": _HEADLESS | {"ports": ports("rpc/UDP/1234/0")},
    "headless-without-port": _HEADLESS | {"ports": None},
}
_CLUSTER_IP: Json = {
    "clusterIP": "198.18.55.4",
    "ports": ports("port1/UDP/1234/4321", "port2/UDP/1235/5321"),
}
_NODE_PORT: Json = {
    "type": "NodePort",
    "clusterIP": "198.18.55.10",
    "ports": ports("port1/UDP/345/678", "port2/TCP/344/677"),
}
_ONLY_LOCAL: Json = {
    **_BALANCER,
    "clusterIP": "198.18.55.12",
    "ports": ports("foobar2/UDP/8677/30063", "baz/UDP/8678/30064"),
    "status": ingress("198.19.2.3"),
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 345,
}


def _proxied_ports(synced: nodes.Synced) -> int:
    """The entries of kube-proxy's service map: ports of services with a cluster IP."""
    return sum(len(one.ports) for one in synced.services.values() if one.cluster_ips)


def _health_checks(synced: nodes.Synced) -> dict[str, int]:
    found = {name: one.health_check_node_port for name, one in synced.services.items()}
    return {name: port for name, port in found.items() if port}


@both
@UPSTREAM.single("TestServiceMapUpdateHeadless")
async def test_service_map_update_headless(family: Family) -> None:
    async with nodes.proxied() as node:
        for name, spec in _HEADLESS_SERVICES.items():
            node.set_service(None, _service(name, family, spec))
        synced = await node.sync()
    # Published for DNS.
    assert synced.changed == {"default/headless", "default/headless-without-port"}
    assert not synced.frontends.changed
    assert not _health_checks(synced)


@both
@UPSTREAM.single("TestUpdateServiceTypeExternalName")
async def test_update_service_type_external_name(family: Family) -> None:
    async with nodes.proxied() as node:
        spec = CASES["external name service"].service
        assert spec is not None
        node.set_service(None, _service("external-name", family, spec))
        synced = await node.sync()
    assert not synced.services
    assert not synced.frontends.changed


@both
@UPSTREAM.single("TestBuildServiceMapAddRemove")
async def test_build_service_map_add_remove(family: Family) -> None:
    specs = {
        "cluster-ip": _CLUSTER_IP,
        "node-port": _NODE_PORT,
        "load-balancer": _BALANCER | {"status": ingress("198.19.2.4")},
        "only-local-load-balancer": _ONLY_LOCAL,
    }
    services = {name: _service(name, family, spec) for name, spec in specs.items()}
    names = {f"default/{name}" for name in specs}
    async with nodes.proxied() as node:
        for service in services.values():
            node.set_service(None, service)
        synced = await node.sync()
        assert _proxied_ports(synced) == 8
        assert synced.changed == names
        assert _health_checks(synced) == {"default/only-local-load-balancer": 345}
        before = services.pop("cluster-ip")
        one_port = _CLUSTER_IP | {"ports": ports("p2/UDP/1235/5321")}
        node.set_service(before, _service("cluster-ip", family, one_port))
        for service in services.values():
            node.set_service(service, None)
        synced = await node.sync()
    assert _proxied_ports(synced) == 1
    assert synced.changed == names
    assert not _health_checks(synced)
    # Its second port only has another name, which no proxy sees.
    assert {key.port for key in synced.frontends.changed} == {1235, 5321}
    assert {key.port for key in synced.frontends.removed} >= {1234, 345, 344, 678, 677, 30063}


@both
@UPSTREAM.single("TestBuildServiceMapServiceUpdate")
async def test_build_service_map_service_update(family: Family) -> None:
    some = ports("p1/UDP/1234/4321", "p2/TCP/1235/5321")
    cluster_ip = _service("svc1", family, _CLUSTER_IP | {"ports": some})
    balancer = _service("svc1", family, _ONLY_LOCAL | {"clusterIP": "198.18.55.4", "ports": some})
    steps = [
        (None, cluster_ip, 1, {}),
        (cluster_ip, balancer, 1, {"default/svc1": 345}),
        (balancer, balancer, 0, {"default/svc1": 345}),
        (balancer, cluster_ip, 1, {}),
    ]
    async with nodes.proxied() as node:
        for old, new, changed, health_checks in steps:
            node.set_service(old, new)
            synced = await node.sync()
            assert _proxied_ports(synced) == 2
            assert len(synced.changed) == changed
            assert _health_checks(synced) == health_checks


@UPSTREAM.single("TestServiceCacheLeaks")
async def test_service_cache_leaks() -> None:
    service = _service("svc1", IPV4, _CLUSTER_IP)
    async with nodes.proxied() as node:
        node.set_service(None, service)
        assert node.kept == 1
        node.set_service(service, None)
        assert node.kept == 0
        assert not (await node.sync()).services
