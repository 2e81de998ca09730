"""One check of one pod: which policies decide about it, and whether packets show that they do."""

from collections.abc import Iterator, Sequence

from agent.network_policy import outcomes, trials
from agent.network_policy.checks import plan
from agent.network_policy.objects import PROTOCOLS
from agent.network_policy.outcomes import Outcome
from agent.network_policy.source import NetworkPolicies
from agent.network_policy.trials import Place, Trial
from agent.network_policy.verdicts import ContainerPort, End
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_state import PodState
from bpf.abi import IPAddress
from probes.netns import NetnsGoneError


async def check(
    state: PodState, witness: PodState | None, policies: NetworkPolicies, labels: ObjectLabels
) -> Outcome:
    """labels: of namespaces. Raises OSError where the agent has no descriptor left."""
    if problem := policies.problem:
        return Outcome(outcomes.UNKNOWN, problem)
    cluster = policies.policies
    # They may change while a trial awaits a packet.
    netns, addresses = state.netns, state.claims.confirmed
    if netns is None or not addresses:
        return Outcome(outcomes.FAILED, "The pod has no address.")
    if _families(state.pod.reported_addresses) - _families(addresses):
        return Outcome(outcomes.FAILED, "Not all addresses of the pod are confirmed yet.")
    # Policies do not distinguish addresses but by ipBlocks, so one of them is enough here.
    own = _end(state, addresses[0], labels)
    names = [name for way in ("Ingress", "Egress") for name in cluster.select(own, way).names]
    if not names:
        return Outcome(outcomes.NO_POLICIES, "No NetworkPolicy selects the pod.")
    if witness is None or witness.netns is None:
        text = "No witness runs on this node: a pod of the DaemonSet podgate-witness."
        return Outcome(outcomes.NO_WITNESS, text)
    other_netns = witness.netns
    pairs = list(_pairs(addresses, witness.claims.confirmed))
    if not pairs:
        text = f"The witness {witness.pod.full_name} has no address of a family that the pod has."
        return Outcome(outcomes.NO_WITNESS, text)
    passed = []
    for address, other in pairs:
        ends = _end(state, address, labels), _end(witness, other, labels)
        for checks in plan(cluster, *ends):
            try:
                trial = await trials.run(checks, Place(netns, address), Place(other_netns, other))
            except NetnsGoneError as error:
                return Outcome(outcomes.FAILED, f"A pod ended during its check: {error}")
            if not trial.is_passed:
                return Outcome(outcomes.NOT_PROGRAMMED, _sentence([trial]))
            passed.append(trial)
    return Outcome(outcomes.PROGRAMMED, _sentence(passed))


def _families(addresses: Sequence[IPAddress]) -> set[int]:
    return {one.version for one in addresses}


def _pairs(
    addresses: Sequence[IPAddress], others: Sequence[IPAddress]
) -> Iterator[tuple[IPAddress, IPAddress]]:
    """The first of each family that both have."""
    for version in (4, 6):
        own, other = (
            next((one for one in found if one.version == version), None)
            for found in (addresses, others)
        )
        if own is not None and other is not None:
            yield own, other


def _end(state: PodState, address: IPAddress, labels: ObjectLabels) -> End:
    pod = state.pod
    return End(
        namespace=pod.namespace,
        address=address,
        labels=pod.labels,
        namespace_labels=dict(labels.of_namespace(pod.namespace)),
        ports=tuple(
            ContainerPort(port.number, protocol, port.name)
            for port in pod.spec.container_ports
            for protocol in PROTOCOLS
            if port.protocol == protocol
        ),
    )


def _sentence(trials_: list[Trial]) -> str:
    texts = list(dict.fromkeys(trial.text for trial in trials_))
    text = "; ".join(texts)
    return f"{text[:1].upper()}{text[1:]}."
