"""The table of HostEgressPolicies: which cgroups of this node each policy is about. Pure."""

from collections.abc import Collection, Mapping, Sequence

from agent import labels
from agent.linux.cgroups import CgroupId
from agent.pods.object_labels import LabelSnapshot
from agent.pods.pod import Pod
from agent.policy.api_types import RuleSource
from agent.policy.egress_types import EgressPolicy
from bpf.host_egress_tables import EgressRule, EgressSubject, EgressTable

_EVERY_POLICY = (1 << 64) - 1
DEPTH_UNKNOWN = "podgate is in a cgroup namespace, and the depth of this node's cgroups is unknown."

Cgroups = Mapping[str, tuple[CgroupId, ...]]
"""By `RuleSource.name`."""


def of_node(policies: Sequence[EgressPolicy], found: LabelSnapshot) -> list[EgressPolicy]:
    """Those that select this node."""
    return [one for one in policies if one.nodes is None or one.nodes.matches(found.node)]


def sources_of(policies: Sequence[EgressPolicy]) -> set[RuleSource]:
    """Of subjects and exceptions."""
    return {source for one in policies for source in (*one.subjects, *one.excepted)}


def uids(
    policies: Sequence[EgressPolicy],
    pods: Collection[Pod],
    found: LabelSnapshot,
    own_namespace: str,
) -> dict[str, list[str]]:
    """The uids of the hostNetwork pods that each selector selects, by `RuleSource.name`. podgate's
    own pods are never among them: the next agent, which has no cgroup yet, needs its way out."""
    selectors = {name: selector for one in policies for name, selector in one.pods.items()}
    others = [pod for pod in pods if pod.host_network and not is_own(pod, own_namespace)]
    return {
        name: [
            pod.uid
            for pod in others
            if selector.matches(pod.namespace, pod.labels, found.of_namespace(pod.namespace))
        ]
        for name, selector in selectors.items()
    }


def is_own(pod: Pod, own_namespace: str) -> bool:
    """Whether it is a pod of podgate's DaemonSet, or of its other parts."""
    return pod.namespace == own_namespace and pod.labels.get(labels.NAME) == labels.OWN_NAME


def table(
    policies: Sequence[EgressPolicy],
    numbers: Mapping[str, int],
    cgroups: Cgroups,
    own: CgroupId | None,
) -> EgressTable:
    """numbers: of policies by name; own: podgate's cgroup, which no policy is about."""
    denied: dict[CgroupId, int] = {}
    excepted: dict[CgroupId, int] = {}
    for policy in policies:
        bit = 1 << numbers[policy.name]
        for masks, sources in ((denied, policy.subjects), (excepted, policy.excepted)):
            for cgroup in (one for source in sources for one in cgroups.get(source.name, ())):
                masks[cgroup] = masks.get(cgroup, 0) | bit
    if own is not None and denied:
        excepted[own] = _EVERY_POLICY
    subjects = {
        cgroup.id: EgressSubject(cgroup.level, denied.get(cgroup, 0), excepted.get(cgroup, 0))
        for cgroup in sorted(denied.keys() | excepted.keys(), key=lambda one: one.id)
        # The root is no subject: everything is below it.
        if cgroup.level
    }
    rules = [
        EgressRule(
            policy=numbers[policy.name],
            network=destination.network,
            is_nodes=destination.network is None,
            protocol=destination.protocol,
            first_port=destination.first_port,
            last_port=destination.last_port,
        )
        for policy in policies
        for destination in policy.destinations
    ]
    enforced = sum(1 << numbers[policy.name] for policy in policies if policy.is_enforced)
    return EgressTable(subjects, tuple(rules), enforced)


def problems(
    policy: EgressPolicy, cgroups: Cgroups, selected: Mapping[str, Collection[str]]
) -> list[str]:
    """Why subjects of a policy are not found, one sentence each. selected: uids of pods by
    selector; a node may well have none."""
    found = []
    for source in policy.subjects:
        of_source = cgroups.get(source.name, ())
        if any(cgroup.level is None for cgroup in of_source):
            found.append(DEPTH_UNKNOWN)
        elif of_source:
            continue
        elif source.kind == "unit":
            found.append(f"This node has no cgroup of {source}.")
        elif count := len(selected.get(source.name, ())):
            found.append(f"No cgroup of the {count} {source} is found.")
    return found
