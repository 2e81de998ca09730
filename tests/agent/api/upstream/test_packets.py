"""kube-proxy's cases of packet flows, on the frontends that all proxies of podgate install.

Compared is where a connection goes. Whether it is masqueraded is the backend's; tests/proxy has it
with packets. eBPF, which sees no connections from outside, has only those of nodes and pods.
"""

import dataclasses
import ipaddress
import socket
from collections.abc import Sequence

import pytest

from agent.services.proxy.frontends import Frontend
from bpf.abi import IPAddress
from bpf.services.tables import ServiceAddress
from tests.agent.api.upstream import endpoint_slices, families
from tests.agent.api.upstream import node as nodes
from tests.agent.api.upstream.families import IPV4, Family, both
from tests.agent.api.upstream.inventory import UpstreamFile
from tests.agent.services.api import making
from tests.agent.services.api.making import NODE, Json

pytestmark = pytest.mark.looptime

UPSTREAM = UpstreamFile("pkg/proxy/nftables/proxier_test.go")
UPSTREAM.none(
    "the text of kube-proxy's own rules, and the names in it",
    "TestOverallNFTablesRules",
    "TestSyncProxyRulesRepeated",
    "TestSyncProxyRulesStartup",
    "Test_servicePortChainNameBase",
    "Test_servicePortEndpointChainNameBase",
)
UPSTREAM.none(
    "podgate does not read the cluster's service networks: packets to an address without a service "
    "are routed as any others",
    "TestProxier_OnServiceCIDRsChanged",
    "TestClusterIPGeneral/packet to unallocated cluster ip",
)
UPSTREAM.none(
    "the cases of servicechangetracker_test.go again",
    "TestBuildServiceMapAddRemove",
    "TestBuildServiceMapServiceHeadless",
    "TestBuildServiceMapServiceTypeExternalName",
    "TestBuildServiceMapServiceUpdate",
)
UPSTREAM.none("the cases of endpointschangetracker_test.go again", "TestUpdateEndpointsMap")

SOURCES = {
    "pod": "198.19.100.2",
    "node": str(nodes.NODE_ADDRESSES[0]),
    "client": "198.18.200.2",
    "blocked": "198.18.201.2",
}
POD_NETWORK = "198.19.0.0/16"
_PROTOCOLS = {
    "TCP": socket.IPPROTO_TCP,
    "UDP": socket.IPPROTO_UDP,
    "SCTP": socket.IPPROTO_SCTP,
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """Services by name, and their slices. Addresses of services are in 198.18.0.0/16."""

    services: dict[str, Json]
    slices: dict[str, str] = dataclasses.field(default_factory=dict)


def balancer(cluster: str, balancer: str, node_port: int, **spec: object) -> Json:
    """A service of type LoadBalancer with port 80."""
    return {
        "type": "LoadBalancer",
        "clusterIP": f"198.18.{cluster}",
        "ports": [{"name": "p80", "protocol": "TCP", "port": 80, "nodePort": node_port}],
        "status": {"loadBalancer": {"ingress": [{"ip": f"198.18.{balancer}"}]}},
        **spec,
    }


async def frontends(
    scene: Scene, family: Family, node_addresses: Sequence[IPAddress] = nodes.NODE_ADDRESSES
) -> dict[ServiceAddress, Frontend]:
    async with nodes.proxied(node_addresses) as node:
        for name, spec in scene.services.items():
            placed = families.placed(spec, family)
            service = making.service(name, clusterIPs=[placed["clusterIP"]], **placed)
            node.set_service(None, service)
        for name, text in scene.slices.items():
            found = endpoint_slices.endpoint_slice(f"default/{name}", text, family, protocol="TCP")
            node.set_slice(None, found)
        return (await node.sync()).frontends.changed


def check(
    table: dict[ServiceAddress, Frontend],
    flow: str,
    family: Family,
    *,
    has_pod_network: bool = True,
) -> None:
    """flow: "source > destination:port/protocol = where it goes". A source is a key of `SOURCES`,
    or a pod's "0.1"; a destination is "node", or a service's "30.41". It goes to endpoints, each
    "0.1:80", or is a REJECT or a DROP.

    has_pod_network: whether the proxy knows which connections are of this node's pods.
    """
    way, _, expected = flow.partition(" = ")
    source_text, _, destination = way.partition(" > ")
    address_text, _, port_text = destination.partition(":")
    port, _, protocol = port_text.partition("/")
    source = ipaddress.ip_address(family.of(SOURCES.get(source_text, f"198.19.{source_text}")))
    address_text = SOURCES["node"] if address_text == "node" else f"198.18.{address_text}"
    address = ipaddress.ip_address(family.of(address_text))
    key = ServiceAddress(address, int(port), _PROTOCOLS[protocol or "TCP"])
    frontend = table.get(key)
    if frontend is None:
        cluster_ips = {one.address for one, found in table.items() if not found.is_external}
        assert expected == ("REJECT" if address in cluster_ips else "")
        return
    if frontend.sources and not any(source in network for network in frontend.sources):
        assert expected == "DROP"
        return
    is_of_pod = source in ipaddress.ip_network(family.network(POD_NETWORK))
    is_inside = source_text == "node" or (is_of_pod and has_pod_network)
    endpoints = frontend.endpoints if is_inside else frontend.outside
    if not endpoints:
        assert expected == ("DROP" if frontend.drops else "REJECT")
        return
    addresses = {f"198.19.{word.partition(':')[0]}": word for word in expected.split()}
    assert endpoints == tuple(
        ServiceAddress(
            ipaddress.ip_address(family.of(text)), int(word.partition(":")[2]), key.protocol
        )
        for text, word in addresses.items()
    )
    # A pod that gets its own endpoint: backends masquerade that.
    assert {one for one in endpoints if one.address == source} <= frontend.local


_ALL_KINDS = balancer("30.41", "60.1", 3001, externalIPs=["198.18.99.11"])

NO_ENDPOINTS = {
    "pod to cluster IP with no endpoints": "pod > 30.41:80 = REJECT",
    "external to external IP with no endpoints": "client > 99.11:80 = REJECT",
    "pod to NodePort with no endpoints": "pod > node:3001 = REJECT",
    "external to NodePort with no endpoints": "client > node:3001 = REJECT",
    "pod to LoadBalancer IP with no endpoints": "pod > 60.1:80 = REJECT",
    "external to LoadBalancer IP with no endpoints": "client > 60.1:80 = REJECT",
}


@both
@UPSTREAM.table("TestNoEndpointsReject", NO_ENDPOINTS)
async def test_no_endpoints_reject(case: str, family: Family) -> None:
    check(await frontends(Scene({"svc1": _ALL_KINDS}), family), case, family)


_SVC2_PORTS: list[Json] = [
    {"name": "http", "protocol": "TCP", "port": 80},
    {"name": "https", "protocol": "TCP", "port": 443},
    {"name": "dns-udp", "protocol": "UDP", "port": 53},
    {"name": "dns-tcp", "protocol": "TCP", "port": 53},
    {"name": "dns-sctp", "protocol": "SCTP", "port": 53},
]
CLUSTER_IP_SCENE = Scene(
    {
        "svc1": {"clusterIP": "198.18.30.41", "ports": _SVC2_PORTS[:1]},
        "svc2": {"clusterIP": "198.18.30.42", "ports": _SVC2_PORTS},
    },
    {
        "svc1-1": "*0.1 : http/80",
        "svc2-1": "*0.1 2.1 : http/80 https/8443 dns-tcp/5353",
        "svc2-2": "*0.1 2.1 : dns-udp/53/UDP dns-sctp/53/SCTP",
    },
)
CLUSTER_IP = {
    "simple clusterIP": "pod > 30.41:80 = 0.1:80",
    "hairpin to cluster IP": "0.1 > 30.41:80 = 0.1:80",
    "clusterIP with multiple endpoints": "pod > 30.42:80 = 0.1:80 2.1:80",
    "clusterIP with TargetPort": "pod > 30.42:443 = 0.1:8443 2.1:8443",
    "clusterIP with TCP, UDP, and SCTP on same port (TCP)": "pod > 30.42:53 = 0.1:5353 2.1:5353",
    # Kubernetes' own name; it is of UDP.
    "clusterIP with TCP, UDP, and SCTP on same port (TCP)#01": (
        "pod > 30.42:53/UDP = 0.1:53 2.1:53"
    ),
    "clusterIP with TCP, UDP, and SCTP on same port (SCTP)": "pod > 30.42:53/SCTP = 0.1:53 2.1:53",
    "TCP-only port does not match UDP traffic": "pod > 30.42:80/UDP = REJECT",
    "svc1 does not accept svc2's ports": "pod > 30.41:443 = REJECT",
}


@both
@UPSTREAM.table("TestClusterIPGeneral", CLUSTER_IP)
async def test_cluster_ip_general(case: str, family: Family) -> None:
    check(await frontends(CLUSTER_IP_SCENE, family), case, family)


RANGES_SCENE = Scene(
    {
        "svc1": balancer(
            "30.41",
            "60.1",
            3001,
            status={"loadBalancer": {"ingress": [{"ip": "198.18.60.1"}, {"ip": "198.18.60.2"}]}},
            loadBalancerSourceRanges=["198.18.250.0/24", " 198.18.200.0/24"],
        )
    },
    {"svc1-1": "*0.1 : p80/80"},
)
RANGES = {
    "pod to cluster IP": "pod > 30.41:80 = 0.1:80",
    "external to nodePort": "client > node:3001 = 0.1:80",
    "nodePort bypasses LoadBalancerSourceRanges": "blocked > node:3001 = 0.1:80",
    "accepted external to LB1": "client > 60.1:80 = 0.1:80",
    "accepted external to LB2": "client > 60.2:80 = 0.1:80",
    "blocked external to LB1": "blocked > 60.1:80 = DROP",
    "blocked external to LB2": "blocked > 60.2:80 = DROP",
    "pod to LB1 (blocked by LoadBalancerSourceRanges)": "pod > 60.1:80 = DROP",
    "pod to LB2 (blocked by LoadBalancerSourceRanges)": "pod > 60.2:80 = DROP",
    "node to LB1 (allowed by LoadBalancerSourceRanges)": "node > 60.1:80 = 0.1:80",
    "node to LB2 (allowed by LoadBalancerSourceRanges)": "node > 60.2:80 = 0.1:80",
    "same node to LB1, SNATted to LB1 (implicitly allowed)": "LB1 > 60.1:80 = 0.1:80",
    "same node to LB2, SNATted to LB2 (implicitly allowed)": "LB2 > 60.2:80 = 0.1:80",
}
SOURCES |= {"LB1": "198.18.60.1", "LB2": "198.18.60.2"}


@both
@UPSTREAM.table("TestLoadBalancer", RANGES)
async def test_load_balancer(case: str, family: Family) -> None:
    check(await frontends(RANGES_SCENE, family), case, family)


_LOOP = "ipv6, multiple nodeport-addresses"


@both
@pytest.mark.parametrize("is_restricted", [False, True])
@UPSTREAM.single(
    "TestNodePorts",
    "ipv4",
    "ipv4, multiple nodeport-addresses",
    "ipv6",
    _LOOP,
    # Flows of all four.
    f"{_LOOP}/pod to cluster IP",
    f"{_LOOP}/external to nodePort",
    f"{_LOOP}/node to nodePort",
    f"{_LOOP}/node to nodePort/external to nodePort on secondary IP",
    f"{_LOOP}/node to nodePort/secondary nodeIP ignores NodePorts",
)
async def test_node_ports(family: Family, is_restricted: bool) -> None:
    """kube-proxy serves node ports at the node's primary address unless --nodeport-addresses has
    more; podgate at all of the node unless --node-addresses names some."""
    spec = balancer("30.41", "60.1", 3001) | {"type": "NodePort", "status": {}}
    scene = Scene({"svc1": spec}, {"svc1-1": "2.1 *0.1 : p80/80"})
    first, second = (ipaddress.ip_address(family.of(f"198.18.250.{last}")) for last in (1, 2))
    given = (first,) if is_restricted else (first, second)
    table = await frontends(scene, family, given)
    for flow in ("pod > 30.41:80", "client > node:3001", "node > node:3001"):
        check(table, f"{flow} = 0.1:80 2.1:80", family)
    check(table, f"client > 250.2:3001 = {'' if is_restricted else '0.1:80 2.1:80'}", family)


_TWO = {"svc1-1": "1.1 *2.1 : p80/80"}
ETP_LOCAL = {
    "pod to cluster IP hits both endpoints, unmasqueraded": "pod > 30.41:80 = 1.1:80 2.1:80",
    "pod to external IP hits both endpoints, unmasqueraded": "pod > 99.11:80 = 1.1:80 2.1:80",
    "external to external IP hits only local endpoint, unmasqueraded": "client > 99.11:80 = 2.1:80",
    "pod to LB IP hits only both endpoints, unmasqueraded": "pod > 60.1:80 = 1.1:80 2.1:80",
    "external to LB IP hits only local endpoint, unmasqueraded": "client > 60.1:80 = 2.1:80",
    "pod to NodePort hits both endpoints, unmasqueraded": "pod > node:3001 = 1.1:80 2.1:80",
    "external to NodePort hits only local endpoint, unmasqueraded": "client > node:3001 = 2.1:80",
}
ETP_CLUSTER = {
    "pod to cluster IP hits both endpoints, unmasqueraded": "pod > 30.41:80 = 1.1:80 2.1:80",
    "pod to external IP hits both endpoints, masqueraded": "pod > 99.11:80 = 1.1:80 2.1:80",
    "external to external IP hits both endpoints, masqueraded": "client > 99.11:80 = 1.1:80 2.1:80",
    "pod to LB IP hits both endpoints, masqueraded": "pod > 60.1:80 = 1.1:80 2.1:80",
    "external to LB IP hits both endpoints, masqueraded": "client > 60.1:80 = 1.1:80 2.1:80",
    "pod to NodePort hits both endpoints, masqueraded": "pod > node:3001 = 1.1:80 2.1:80",
    "external to NodePort hits both endpoints, masqueraded": "client > node:3001 = 1.1:80 2.1:80",
}


@both
@UPSTREAM.table("TestExternalTrafficPolicyLocal", ETP_LOCAL)
async def test_external_traffic_policy_local(case: str, family: Family) -> None:
    local = _ALL_KINDS | {"externalTrafficPolicy": "Local", "healthCheckNodePort": 30000}
    table = await frontends(Scene({"svc1": local}, _TWO), family)
    check(table, case, family)
    # "Unmasqueraded", for clients from outside.
    assert all(one.preserves_client_ip for one in table.values() if one.is_external)


@both
@UPSTREAM.table("TestExternalTrafficPolicyCluster", ETP_CLUSTER)
async def test_external_traffic_policy_cluster(case: str, family: Family) -> None:
    table = await frontends(Scene({"svc1": _ALL_KINDS}, _TWO), family)
    check(table, case, family)
    assert not any(one.preserves_client_ip for one in table.values())


@dataclasses.dataclass(frozen=True)
class Policy:
    """Endpoints of a service; flows by their upstream names."""

    endpoints: str
    flows: dict[str, str]
    spec: Json = dataclasses.field(default_factory=dict)


_ITP_LOCAL: Json = {"internalTrafficPolicy": "Local"}
ITP = {
    "internalTrafficPolicy is cluster": Policy(
        "*1.1 1.2 1.3",
        {"pod to ClusterIP hits all endpoints": "pod > 30.41:80 = 1.1:80 1.2:80 1.3:80"},
        {"internalTrafficPolicy": "Cluster"},
    ),
    "internalTrafficPolicy is local and there is one local endpoint": Policy(
        "*1.1 1.2 1.3",
        {"pod to ClusterIP hits only local endpoint": "pod > 30.41:80 = 1.1:80"},
        _ITP_LOCAL,
    ),
    "internalTrafficPolicy is local and there are multiple local endpoints": Policy(
        "*1.1 *1.2 1.3",
        {"pod to ClusterIP hits all local endpoints": "pod > 30.41:80 = 1.1:80 1.2:80"},
        _ITP_LOCAL,
    ),
    "internalTrafficPolicy is local and there are no local endpoints": Policy(
        "1.1 1.2 1.3", {"no endpoints": "pod > 30.41:80 = DROP"}, _ITP_LOCAL
    ),
}
_READY = "*1.1 *1.2 *1.3~ *1.4~! 1.5"
TERMINATING_LOCAL = {
    "ready endpoints exist": Policy(
        _READY,
        {
            "pod to clusterIP": "pod > 30.41:80 = 1.1:80 1.2:80 1.5:80",
            "external to LB": "client > 60.1:80 = 1.1:80 1.2:80",
        },
    ),
    "only terminating endpoints exist": Policy(
        "*1.2~ *1.3~ *1.4~! 1.5",
        {
            "pod to clusterIP": "pod > 30.41:80 = 1.5:80",
            "external to LB": "client > 60.1:80 = 1.2:80 1.3:80",
        },
    ),
    "terminating endpoints on remote node": Policy(
        "1.5~",
        {
            "pod to clusterIP": "pod > 30.41:80 = 1.5:80",
            "external to LB, no locally-usable endpoints": "client > 60.1:80 = DROP",
        },
    ),
    "no usable endpoints on any node": Policy(
        "*1.5~! 1.5~!",
        {
            "pod to clusterIP, no usable endpoints": "pod > 30.41:80 = REJECT",
            "external to LB, no usable endpoints": "client > 60.1:80 = REJECT",
        },
    ),
}
TERMINATING_CLUSTER = {
    "ready endpoints exist": Policy(
        "*1.1 *1.2 1.3~ 1.4~! 1.5",
        {
            "pod to clusterIP": "pod > 30.41:80 = 1.1:80 1.2:80 1.5:80",
            "external to LB": "client > 60.1:80 = 1.1:80 1.2:80 1.5:80",
        },
    ),
    "only terminating endpoints exist": Policy(
        "*1.2~ *1.3~ 1.4~! 1.5~",
        {
            "pod to clusterIP": "pod > 30.41:80 = 1.2:80 1.3:80 1.5:80",
            "external to LB": "client > 60.1:80 = 1.2:80 1.3:80 1.5:80",
        },
    ),
    "terminating endpoints on remote node": Policy(
        "1.5~",
        {
            "pod to clusterIP": "pod > 30.41:80 = 1.5:80",
            "external to LB": "client > 60.1:80 = 1.5:80",
        },
    ),
    "no usable endpoints on any node": Policy(
        "*1.5~! 1.5~!",
        {
            "pod to clusterIP": "pod > 30.41:80 = REJECT",
            "external to LB": "client > 60.1:80 = REJECT",
        },
    ),
}


def declare_flows(test: str, table: dict[str, Policy], *after: str) -> None:
    """The flows of each case; and those after its endpoints were deleted, of all cases."""
    UPSTREAM.single(test, *(f"{case}/{flow}" for case in table for flow in table[case].flows))
    UPSTREAM.single(test, *(f"{list(table)[-1]}/{flow}" for flow in after))


async def _check_policy(case: Policy, spec: Json, family: Family, *after: str) -> None:
    slices = {"svc1-1": f"{case.endpoints} : p80/80"}
    table = await frontends(Scene({"svc1": spec | case.spec}, slices), family)
    for flow in case.flows.values():
        check(table, flow, family)
    table = await frontends(Scene({"svc1": spec | case.spec}), family)
    for flow in after:
        check(table, flow, family)


declare_flows("TestInternalTrafficPolicy", ITP, "endpoints deleted")
_AFTER = ("pod to clusterIP after endpoints deleted", "external to LB after endpoints deleted")
declare_flows("TestTerminatingEndpointsTrafficPolicyLocal", TERMINATING_LOCAL, *_AFTER)
declare_flows("TestTerminatingEndpointsTrafficPolicyCluster", TERMINATING_CLUSTER, *_AFTER)
_DELETED = ("pod > 30.41:80 = REJECT", "client > 60.1:80 = REJECT")


@both
@UPSTREAM.table("TestInternalTrafficPolicy", ITP)
async def test_internal_traffic_policy(case: Policy, family: Family) -> None:
    spec = balancer("30.41", "60.1", 3001) | {"type": "ClusterIP", "status": {}}
    spec["ports"] = [{"name": "p80", "protocol": "TCP", "port": 80}]
    await _check_policy(case, spec, family, _DELETED[0])


@both
@UPSTREAM.table("TestTerminatingEndpointsTrafficPolicyLocal", TERMINATING_LOCAL)
async def test_terminating_endpoints_traffic_policy_local(case: Policy, family: Family) -> None:
    spec = balancer("30.41", "60.1", 0, externalTrafficPolicy="Local", healthCheckNodePort=30000)
    await _check_policy(case, spec, family, *_DELETED)


@both
@UPSTREAM.table("TestTerminatingEndpointsTrafficPolicyCluster", TERMINATING_CLUSTER)
async def test_terminating_endpoints_traffic_policy_cluster(case: Policy, family: Family) -> None:
    spec = balancer("30.41", "60.1", 0, externalTrafficPolicy="Cluster", healthCheckNodePort=30000)
    await _check_policy(case, spec, family, *_DELETED)


MASQUERADE_SCENE = Scene(
    {
        "svc1": balancer("30.41", "60.1", 3001),
        "svc2": balancer("30.42", "60.2", 3002, externalTrafficPolicy="Local"),
        "svc3": balancer("30.43", "60.3", 3003, internalTrafficPolicy="Local"),
    },
    {
        "svc1-1": "*0.1 1.1 : p80/80",
        "svc2-1": "*0.2 1.2 : p80/80",
        "svc3-1": "*0.3 1.3 : p80/80",
    },
)
_ALL1, _ALL2, _ALL3 = (f"0.{number}:80 1.{number}:80" for number in (1, 2, 3))
MASQUERADE = {
    "pod to ClusterIP": f"pod > 30.41:80 = {_ALL1}",
    "pod to NodePort": f"pod > node:3001 = {_ALL1}",
    "pod to LB": f"pod > 60.1:80 = {_ALL1}",
    "node to ClusterIP": f"node > 30.41:80 = {_ALL1}",
    "node to NodePort": f"node > node:3001 = {_ALL1}",
    "node to LB": f"node > 60.1:80 = {_ALL1}",
    "external to ClusterIP": f"client > 30.41:80 = {_ALL1}",
    "external to NodePort": f"client > node:3001 = {_ALL1}",
    "external to LB": f"client > 60.1:80 = {_ALL1}",
    "pod to ClusterIP with eTP:Local": f"pod > 30.42:80 = {_ALL2}",
    "pod to NodePort with eTP:Local": f"pod > node:3002 = {_ALL2}",
    "pod to LB with eTP:Local": f"pod > 60.2:80 = {_ALL2}",
    "node to ClusterIP with eTP:Local": f"node > 30.42:80 = {_ALL2}",
    "node to NodePort with eTP:Local": f"node > node:3002 = {_ALL2}",
    "node to LB with eTP:Local": f"node > 60.2:80 = {_ALL2}",
    "external to ClusterIP with eTP:Local": f"client > 30.42:80 = {_ALL2}",
    "external to NodePort with eTP:Local": "client > node:3002 = 0.2:80",
    "external to LB with eTP:Local": "client > 60.2:80 = 0.2:80",
    "pod to ClusterIP with iTP:Local": "pod > 30.43:80 = 0.3:80",
    "pod to NodePort with iTP:Local": f"pod > node:3003 = {_ALL3}",
    "pod to LB with iTP:Local": f"pod > 60.3:80 = {_ALL3}",
    "node to ClusterIP with iTP:Local": "node > 30.43:80 = 0.3:80",
    "node to NodePort with iTP:Local": f"node > node:3003 = {_ALL3}",
    "node to LB with iTP:Local": f"node > 60.3:80 = {_ALL3}",
    "external to ClusterIP with iTP:Local": "client > 30.43:80 = 0.3:80",
    "external to NodePort with iTP:Local": f"client > node:3003 = {_ALL3}",
    "external to LB with iTP:Local": f"client > 60.3:80 = {_ALL3}",
}
# Of the differences without a pod network: the others are of masquerading.
WITHOUT_POD_NETWORK = {
    "pod to NodePort with eTP:Local": "pod > node:3002 = 0.2:80",
    "pod to LB with eTP:Local": "pod > 60.2:80 = 0.2:80",
}
_POLICIES = ("", " with eTP:Local", " with iTP:Local")
_NO_NETWORK, _ALL = "no LocalTrafficDetector", "masqueradeAll"
UPSTREAM.none(
    "only whether it is masqueraded differs",
    *(
        f"TestInternalExternalMasquerade/{_NO_NETWORK}/{source} to ClusterIP{policy}"
        for source in ("node", "external")
        for policy in _POLICIES
    ),
)
UPSTREAM.none(
    "podgate has no option to masquerade all connections",
    *(
        f"TestInternalExternalMasquerade/{case}{flow}"
        for case in (_ALL, f"{_ALL}, {_NO_NETWORK}")
        for flow in (
            "",
            *(f"/pod to ClusterIP{policy}" for policy in _POLICIES),
        )
    ),
    *(
        f"TestInternalExternalMasquerade/{_ALL}, {_NO_NETWORK}/{flow}"
        for flow in WITHOUT_POD_NETWORK
    ),
)


@both
@UPSTREAM.single("TestInternalExternalMasquerade", "base")
@UPSTREAM.table("TestInternalExternalMasquerade", MASQUERADE)
async def test_internal_external_masquerade(case: str, family: Family) -> None:
    check(await frontends(MASQUERADE_SCENE, family), case, family)


@both
@UPSTREAM.single(
    "TestInternalExternalMasquerade",
    _NO_NETWORK,
    *(f"{_NO_NETWORK}/{flow}" for flow in WITHOUT_POD_NETWORK),
)
async def test_without_pod_network_pods_are_clients_from_outside(family: Family) -> None:
    table = await frontends(MASQUERADE_SCENE, family)
    for flow in (MASQUERADE | WITHOUT_POD_NETWORK).values():
        check(table, flow, family, has_pod_network=False)


@both
@UPSTREAM.single("TestHealthCheckNodePortWhenTerminating")
async def test_health_check_node_port_when_terminating(family: Family) -> None:
    def ready_here(*conditions: tuple[bool, bool, bool]) -> int:
        endpoints = [
            making.endpoint_json(
                family.of(f"198.19.1.{number}"),
                node=NODE,
                ready=ready,
                serving=serving,
                terminating=terminating,
            )
            for number, (ready, serving, terminating) in enumerate(conditions, start=1)
        ]
        address = family.of("198.18.30.41")
        found = making.encoded(
            making.service(clusterIP=address, clusterIPs=[address]),
            making.endpoint_slice(*endpoints, family=family.name),
        )
        (port,) = found.ports
        return sum(one.is_local and not one.is_terminating for one in port.endpoints)

    ready, unready = (True, True, False), (False, False, False)
    assert ready_here(ready, ready, ready, unready) == 3
    ending = (False, True, True)
    assert ready_here((False, True, False), ending, ending, (False, False, True)) == 0


@dataclasses.dataclass(frozen=True)
class NoLocal:
    """Endpoints of a service; whether connections are dropped since none of them is on this node,
    to its cluster IP and from outside: what kube-proxy's metric counts."""

    endpoints: str
    policies: Json
    is_internal_dropped: bool = False
    is_external_dropped: bool = False


_ETP_LOCAL: Json = {"externalTrafficPolicy": "Local"}
NO_LOCAL = {
    "internalTrafficPolicy is set and there are local endpoints": NoLocal(
        "*1.1 1.2 1.3", _ITP_LOCAL
    ),
    "externalTrafficPolicy is set and there are local endpoints": NoLocal(
        "*1.1 1.2 1.3", _ETP_LOCAL
    ),
    "both policies are set and there are local endpoints": NoLocal(
        "*1.1 1.2 1.3", _ITP_LOCAL | _ETP_LOCAL
    ),
    "internalTrafficPolicy is set and there are no local endpoints": NoLocal(
        "1.1 1.2 1.3", _ITP_LOCAL, is_internal_dropped=True
    ),
    "externalTrafficPolicy is set and there are no local endpoints": NoLocal(
        "1.1 1.2 1.3", _ETP_LOCAL, is_external_dropped=True
    ),
    "both policies are set and there are no local endpoints": NoLocal(
        "1.1 1.2 1.3", _ITP_LOCAL | _ETP_LOCAL, is_internal_dropped=True, is_external_dropped=True
    ),
    "both policies are set and there are no endpoints at all": NoLocal("", _ITP_LOCAL | _ETP_LOCAL),
}


@both
@UPSTREAM.table("TestNoEndpointsMetric", NO_LOCAL)
async def test_no_endpoints_metric(case: NoLocal, family: Family) -> None:
    spec = balancer("30.41", "60.1", 123, **case.policies) | {"type": "NodePort", "status": {}}
    slices = {"svc1-1": f"{case.endpoints} : p80/80"}
    table = await frontends(Scene({"svc1": spec}, slices), family)
    dropped = {
        is_external: any(
            one.drops and not one.outside
            for one in table.values()
            if one.is_external is is_external
        )
        for is_external in (False, True)
    }
    assert dropped == {False: case.is_internal_dropped, True: case.is_external_dropped}


MODES = {"ipMode Proxy": "Proxy", "ipMode VIP": "VIP", "ipMode nil": None}


@both
@UPSTREAM.table("TestLoadBalancerIngressRouteTypeProxy", MODES)
async def test_load_balancer_ingress_route_type_proxy(case: str | None, family: Family) -> None:
    status = {"loadBalancer": {"ingress": [{"ip": "198.18.60.1", "ipMode": case}]}}
    spec = balancer("30.41", "60.1", 3001, status=status)
    table = await frontends(Scene({"svc1": spec}, _TWO), family)
    addresses = {str(key.address) for key in table}
    assert (family.of("198.18.60.1") in addresses) is (case != "Proxy")


@UPSTREAM.single("TestBadIPs")
async def test_bad_ips() -> None:
    """Of IPv4 alone: numbers with zeros before them are decimal."""
    spec = balancer(
        "0.041",
        "60.004",
        3001,
        externalIPs=["198.018.099.022"],
        loadBalancerSourceRanges=["198.018.200.000/024"],
    )
    async with nodes.proxied() as node:
        node.set_service(None, making.service("svc1", clusterIPs=[spec["clusterIP"]], **spec))
        endpoint = making.endpoint_json("198.19.00.001", node=NODE)
        node.set_slice(
            None,
            making.endpoint_slice(
                endpoint,
                name="svc1-1",
                service="svc1",
                ports=[{"name": "p80", "protocol": "TCP", "port": 80}],
            ),
        )
        table = (await node.sync()).frontends.changed
    for destination in ("0.41:80", "99.22:80", "60.4:80", "node:3001"):
        check(table, f"client > {destination} = 0.1:80", IPV4)
    check(table, "blocked > 60.4:80 = DROP", IPV4)


@both
async def test_session_affinity_is_of_all_addresses_of_a_family(family: Family) -> None:
    """kube-proxy has no case of its own, but in the text of its rules."""
    spec = _ALL_KINDS | {
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
    }
    table = await frontends(Scene({"svc1": spec}, _TWO), family)
    assert len(table) == 4
    assert {one.affinity_seconds for one in table.values()} == {60}
