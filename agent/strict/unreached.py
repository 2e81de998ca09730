"""Pods of mode enforce that the kubelet cannot reach, so that the relay proxies its connections.

In enforce the kubelet connects to the pod itself, since nothing is to change for pods that work.
Where its connections do not arrive (a CNI blocks the node, or has no route for it), probes and
hooks fail whatever the pod does. So the relay proxies them, by each address that the node does not
reach, as in strict. The gate admits the kubelet all the same.

Only facts count: the path test did not arrive, and no gate of the pod has admitted a connection of
the kubelet since the test before. A firewall may drop the test, and admit probes. A pod that is
being deleted keeps what it had (`agent/gates/path_test.py`): a relay for its preStop hook, or none.
"""

from collections.abc import Iterable

from agent.kubelet.admitted_ports import kubelet_rules
from agent.pods.pod_state import PathTestResult, PodState
from bpf.verdicts import Mode
from probes.spec.specs import PodSpec


def unreached_addresses(
    states: Iterable[PodState], *, https_hooks: bool
) -> dict[str, frozenset[str]]:
    """By uid of pods in enforce, the addresses at which the kubelet cannot reach them.

    https_hooks: the feature gate PodLifecycleHTTPS; without it pods are not proxied for https
    hooks alone.
    """
    states = list(states)
    is_blocked = _is_node_blocked(states)
    found = {
        state.pod.uid: frozenset(
            address for address in state.own_addresses if _is_unreached(state, address, is_blocked)
        )
        for state in states
        if state.pod.mode is Mode.ENFORCE and _has_purpose(state.pod.spec, https_hooks)
    }
    return {uid: addresses for uid, addresses in found.items() if addresses}


def _is_node_blocked(states: Iterable[PodState]) -> bool:
    """Whether the node reaches none of the pods that are tested, and at least one is.

    A CNI that blocks one pod from the node blocks all, so new pods need not wait for their test.
    Pods that are being deleted show nothing: their networks are removed.
    """
    tests = (state.sandbox_path_test for state in states if not state.pod.is_deleting)
    found = [tested for tested in tests if tested and tested.results]
    return bool(found) and all(
        not tested.is_kubelet_seen and set(tested.results.values()) == {PathTestResult.UNREACHABLE}
        for tested in found
    )


def _is_unreached(state: PodState, address: str, is_node_blocked: bool) -> bool:
    tested = state.sandbox_path_test
    result = tested.results.get(address) if tested else None
    if tested is None or result is None:
        return is_node_blocked
    return result is PathTestResult.UNREACHABLE and not tested.is_kubelet_seen


def _has_purpose(spec: PodSpec, https_hooks: bool) -> bool:
    """Whether the pod has probes or hooks for which it is proxied."""
    if https_hooks or spec.errors:
        return bool(kubelet_rules(spec))
    return any(not user.is_https_hook for user in spec.port_users)
