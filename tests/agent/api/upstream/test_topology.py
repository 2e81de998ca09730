"""kube-proxy's cases of CategorizeEndpoints, on the published message."""

import dataclasses

from tests.agent.api.upstream.families import Family, both
from tests.agent.api.upstream.inventory import UpstreamFile
from tests.agent.services.api import making
from tests.agent.services.api.making import NODE, Json

UPSTREAM = UpstreamFile("pkg/proxy/topology_test.go")

ITP: Json = {"internalTrafficPolicy": "Local"}
ETP: Json = {"externalTrafficPolicy": "Local"}
EXTERNAL: Json = {
    "type": "NodePort",
    "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 8080}],
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One case. cluster, local: indexes of the expected endpoints; None where not used.

    endpoints: a word for each. R: ready. T: serving and terminating. U: unready. Upper case on this
    node, lower case elsewhere; then its hints, @ZONE or @node1 for this node.
    """

    endpoints: str
    cluster: str | None
    local: str | None = None
    service: Json = dataclasses.field(default_factory=dict)
    zone: str = "a"
    is_only_remote: bool = False
    """Endpoints exist, and none is for this node."""


CASES = {
    "should use topology since all endpoints have hints, node has a zone label and and there are "
    "endpoints for the node's zone": Topology("r@a r@b r@c r@a", "0 3"),
    "externalTrafficPolicy: Local, topology ignored for Local endpoints": Topology(
        "R@a R@b r@c r@a", "0 3", "0 1", EXTERNAL | ETP
    ),
    "internalTrafficPolicy: Local, topology ignored for Local endpoints": Topology(
        "R@a R@b r@c r@a", "0 3", "0 1", EXTERNAL | ITP
    ),
    "empty node labels": Topology("r@a", "0", zone=""),
    # A node without the label and one whose label is empty are the same to podgate.
    "empty zone label": Topology("r@a", "0", zone=""),
    "node in different zone, no endpoint filtering": Topology("r@a", "0", zone="b"),
    "unready endpoint": Topology("r@a r@b r@c u@a", "0"),
    "only unready endpoints in same zone (should not filter)": Topology("u@a r@b r@c u@a", "1 2"),
    "missing hints, no filtering applied": Topology("r@a r@b r r@a", "0 1 2 3"),
    "multiple hints per endpoint, filtering includes any endpoint with zone included": Topology(
        "r@a,b,c r@b,c r@b,d r@c", "0 1 3", zone="c"
    ),
    # podgate has no such feature gate; a control plane that has it disabled writes no such hints.
    "PreferSameNode falls back to same-zone when feature gate disabled": Topology(
        "r@a r@b r@c r@a", "0 3"
    ),
    "PreferSameNode available": Topology("r@a,node1 r@b,node2 r@c,node3 r@a,node4", "0"),
    "PreferSameNode ignored if some endpoints unhinted": Topology(
        "r@a,node1 r r@c,node3 r@a,node4", "0 1 2 3"
    ),
    "PreferSameNode falls back to PreferSameZone if no endpoint for node": Topology(
        "r@a,node5 r@b,node2 r@c,node3 r@a,node4", "0 3"
    ),
    "conflicting topology and localness require merging allEndpoints": Topology(
        "R@a R@b r@a r@b", "0 2", "0 1", EXTERNAL | ETP
    ),
    "internalTrafficPolicy: Local, with empty endpoints": Topology("", None, "", ITP),
    "internalTrafficPolicy: Local, but all endpoints are remote": Topology(
        "r r", None, "", ITP, is_only_remote=True
    ),
    "internalTrafficPolicy: Local, all endpoints are local": Topology("R R", None, "0 1", ITP),
    "internalTrafficPolicy: Local, some endpoints are local": Topology("R r", None, "0", ITP),
    "Cluster traffic policy, endpoints not Ready": Topology("u u", ""),
    "Cluster traffic policy, some endpoints are Ready": Topology("u r", "1"),
    "Cluster traffic policy, all endpoints are terminating": Topology("T t", "0 1"),
    "iTP: Local, eTP: Cluster, some endpoints local": Topology("R r", "0 1", "0", EXTERNAL | ITP),
    "iTP: Cluster, eTP: Local, some endpoints local": Topology("R r", "0 1", "0", EXTERNAL | ETP),
    "iTP: Local, eTP: Local, some endpoints local": Topology(
        "R r", "0 1", "0", EXTERNAL | ITP | ETP
    ),
    "iTP: Local, eTP: Local, all endpoints remote": Topology(
        "r r", "0 1", "", EXTERNAL | ITP | ETP
    ),
    "iTP: Local, eTP: Local, all endpoints remote and terminating": Topology(
        "t t", "0 1", "", EXTERNAL | ITP | ETP
    ),
    "iTP: Cluster, eTP: Local, with terminating endpoints": Topology(
        "r U T t", "0", "2", EXTERNAL | ETP
    ),
    "externalTrafficPolicy ignored if not externally accessible": Topology("r R", "0 1", None, ETP),
    "no cluster endpoints for iTP:Local internal-only service": Topology("r R", None, "1", ITP),
    "empty endpoints when no service endpoints exist": Topology("", ""),
    "single endpoint not ready, not serving, not terminating": Topology("u", ""),
}


@both
@UPSTREAM.table("TestCategorizeEndpoints", CASES)
def test_categorize_endpoints(case: Topology, family: Family) -> None:
    spec = {"clusterIP": family.of("198.18.0.1"), "clusterIPs": [family.of("198.18.0.1")]}
    (port,) = making.encoded(
        making.service(**spec, **case.service),
        making.endpoint_slice(*_endpoints(case.endpoints, family), family=family.name),
        zone=case.zone,
    ).ports
    cluster, local = _addresses(case.cluster, family), _addresses(case.local, family)
    internal = local if "internalTrafficPolicy" in case.service else cluster
    assert making.targets(port) == internal
    is_external = "type" in case.service
    external = local if "externalTrafficPolicy" in case.service else cluster
    assert making.targets(port, "external") == (external if is_external else [])
    assert making.targets(port, "external_from_node") == (cluster if is_external else [])
    assert len(port.endpoints) == len({*cluster, *local})
    assert port.has_endpoints_anywhere is (bool(cluster or local) or case.is_only_remote)


def _endpoints(text: str, family: Family) -> list[Json]:
    made = []
    for index, word in enumerate(text.split()):
        state, _, hints = word.partition("@")
        names = hints.split(",") if hints else []
        nodes = [name for name in names if name.startswith("node")]
        made.append(
            making.endpoint_json(
                _address(index, family),
                node=NODE if state.isupper() else "other",
                ready=state.upper() == "R",
                serving=state.upper() != "U",
                terminating=state.upper() == "T",
                zones=[name for name in names if name not in nodes],
                nodes=nodes,
            )
        )
    return made


def _address(index: int, family: Family) -> str:
    return family.of(f"198.19.0.{index + 1}")


def _addresses(indexes: str | None, family: Family) -> list[str]:
    return [f"{_address(int(index), family)}:8080" for index in (indexes or "").split()]
