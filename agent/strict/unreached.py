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
    state: PodState, *, is_node_blocked: bool, https_hooks: bool
) -> frozenset[str]:
    """The addresses at which the kubelet cannot reach a pod in enforce.

    https_hooks: the feature gate PodLifecycleHTTPS; without it pods are not proxied for https
    hooks alone.
    """
    if state.pod.mode is not Mode.ENFORCE:
        return frozenset()
    found = [one for one in state.own_addresses if _is_unreached(state, one, is_node_blocked)]
    return frozenset(found if found and _has_purpose(state.pod.spec, https_hooks) else ())


def is_node_blocked(shown: Iterable[bool]) -> bool:
    """Whether the node reaches none of the pods that are tested, and at least one is. shown: what
    these show, as of `shows_blocked_node`.

    A CNI that blocks one pod from the node blocks all, so new pods need not wait for their test.
    """
    found = list(shown)
    return bool(found) and all(found)


def shows_blocked_node(state: PodState) -> bool | None:
    """Whether the path test of this pod shows that the node does not reach pods; None if it shows
    nothing, as those of pods that are being deleted: their networks are removed."""
    tested = state.sandbox_path_test
    if state.pod.is_deleting or tested is None or not tested.results:
        return None
    is_unreachable = set(tested.results.values()) == {PathTestResult.UNREACHABLE}
    return is_unreachable and not tested.is_kubelet_seen


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
