"""kube-proxy's rules (pkg/proxy/topology.go), as a table and over all small cases."""

import itertools

import msgspec
import pytest

from agent.services.api.topology import EndpointChoice, NodeTopology, TrafficPolicies, choose

HERE = NodeTopology("node1", "a")
CLUSTER = TrafficPolicies()
LOCAL = TrafficPolicies(is_internal_local=True)
OUTSIDE = TrafficPolicies(is_reachable_from_outside=True)
OUTSIDE_LOCAL = TrafficPolicies(is_external_local=True, is_reachable_from_outside=True)
ALL_LOCAL = TrafficPolicies(
    is_internal_local=True, is_external_local=True, is_reachable_from_outside=True
)


class One(msgspec.Struct, frozen=True):
    """Only the properties of an endpoint that the rules use."""

    is_local: bool = False
    is_ready: bool = True
    is_last_resort: bool = False
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


# R: ready. T: serving and terminating. U: unready; also what terminates and serves no more.
# Upper case here, lower case elsewhere. @a: meant for zone a; @node1: meant for that node.
def endpoints(text: str) -> list[One]:
    made = []
    for word in text.split():
        state, _, hints = word.partition("@")
        names = tuple(hints.split(",")) if hints else ()
        made.append(
            One(
                is_local=state.isupper(),
                is_ready=state.upper() == "R",
                is_last_resort=state.upper() == "T",
                zones=tuple(name for name in names if not name.startswith("node")),
                nodes=tuple(name for name in names if name.startswith("node")),
            )
        )
    return made


@pytest.mark.parametrize(
    ("text", "policies", "internal", "external", "from_node", "has_any"),
    [
        # Cluster: what is ready, wherever.
        ("", CLUSTER, "", "", "", False),
        ("r R", CLUSTER, "0 1", "", "", True),
        ("r R u", OUTSIDE, "0 1", "0 1", "0 1", True),
        ("u U", OUTSIDE, "", "", "", False),
        ("t r", CLUSTER, "1", "", "", True),
        # Nothing is ready: what still serves on its way out, wherever.
        ("t T u", OUTSIDE, "0 1", "0 1", "0 1", True),
        # Local: the node's own, and when none is ready, its own that still serve.
        ("r R", LOCAL, "1", "", "", True),
        ("r T", LOCAL, "1", "", "", True),
        ("r R T", LOCAL, "1", "", "", True),
        ("r t U", LOCAL, "", "", "", True),
        ("t", LOCAL, "", "", "", True),
        ("u U", LOCAL, "", "", "", False),
        # Local from outside only: what the node itself sends there goes anywhere.
        ("r R", OUTSIDE_LOCAL, "0 1", "1", "0 1", True),
        ("r T", OUTSIDE_LOCAL, "0", "1", "0", True),
        ("r U", OUTSIDE_LOCAL, "0", "", "0", True),
        ("t T", OUTSIDE_LOCAL, "0 1", "1", "0 1", True),
        ("r R", ALL_LOCAL, "1", "1", "0 1", True),
        ("r", ALL_LOCAL, "", "", "0", True),
        # Not reachable from outside, so the external policy has no effect.
        ("r R", TrafficPolicies(is_external_local=True), "0 1", "", "", True),
        # Zones: all ready ones have a hint, and one of them is ours.
        ("r@a r@b", CLUSTER, "0", "", "", True),
        ("r@a,b r@b", CLUSTER, "0", "", "", True),
        ("r@a r", CLUSTER, "0 1", "", "", True),
        ("r@b r@c", CLUSTER, "0 1", "", "", True),
        ("r@a r@b u", CLUSTER, "0", "", "", True),
        ("r@b u@a", CLUSTER, "0", "", "", True),
        ("t@a t@b", CLUSTER, "0 1", "", "", True),
        # Nodes likewise, before zones.
        ("r@node1 r@node2", CLUSTER, "0", "", "", True),
        ("r@node1,a r@node2,a", CLUSTER, "0", "", "", True),
        ("r@node1 r", CLUSTER, "0 1", "", "", True),
        ("r@node2,a r@node3,b", CLUSTER, "0", "", "", True),
        ("r@node2,b r@node3,b", CLUSTER, "0 1", "", "", True),
        ("r@node1,a r@a", CLUSTER, "0 1", "", "", True),
        # Local ignores hints.
        ("R@b r@a", LOCAL, "0", "", "", True),
        ("R@b r@a", OUTSIDE_LOCAL, "1", "0", "1", True),
    ],
)
def test_endpoints_are_chosen_by_the_rules(
    text: str,
    policies: TrafficPolicies,
    internal: str,
    external: str,
    from_node: str,
    has_any: bool,
) -> None:
    def indexes(words: str) -> frozenset[int]:
        return frozenset(map(int, words.split()))

    assert choose(endpoints(text), policies, HERE) == EndpointChoice(
        indexes(internal), indexes(external), indexes(from_node), has_any
    )


def test_node_without_a_zone_ignores_zone_hints() -> None:
    assert choose(endpoints("r@a r@b"), CLUSTER, NodeTopology("node1")).internal == {0, 1}


STATES = ("r", "t", "u", "R", "T", "U")
HINTS = ("", "@a", "@b", "@node1", "@node2", "@node1,b")
WORDS = tuple(state + hint for state in STATES for hint in HINTS)


@pytest.mark.parametrize("is_internal_local", [False, True])
@pytest.mark.parametrize("is_external_local", [False, True])
@pytest.mark.parametrize("is_reachable", [False, True])
def test_all_pairs_of_endpoints_obey_the_rules(
    is_internal_local: bool, is_external_local: bool, is_reachable: bool
) -> None:
    policies = TrafficPolicies(is_internal_local, is_external_local, is_reachable)
    for words in itertools.combinations_with_replacement(WORDS, 2):
        found = endpoints(" ".join(words))
        assert choose(found, policies, HERE) == by_definition(found, policies), words


def by_definition(found: list[One], policies: TrafficPolicies) -> EndpointChoice:
    """The rules in another form, as statements about sets."""
    everything = set(range(len(found)))
    ready = {i for i in everything if found[i].is_ready}
    leaving = {i for i in everything if found[i].is_last_resort}
    own = {i for i in everything if found[i].is_local}
    for_node = {i for i in ready if "node1" in found[i].nodes}
    for_zone = {i for i in ready if "a" in found[i].zones}
    all_for_nodes = all(found[i].nodes for i in ready)
    all_for_zones = all(found[i].zones for i in ready)
    cluster = (
        (for_node if all_for_nodes else set())
        or (for_zone if all_for_zones else set())
        or ready
        or leaving
    )
    local = (ready & own) or (leaving & own)
    return EndpointChoice(
        internal=frozenset(local if policies.is_internal_local else cluster),
        external=frozenset(
            (local if policies.is_external_local else cluster)
            if policies.is_reachable_from_outside
            else ()
        ),
        external_from_node=frozenset(cluster if policies.is_reachable_from_outside else ()),
        has_any=bool(ready | leaving),
    )
