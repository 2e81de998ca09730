"""The condition `podgate.io/isolation-ready` of one pod, from all that decides it. No I/O."""

import dataclasses
from collections.abc import Iterable

from agent.pods.conditions import FALSE, TRUE, Condition
from agent.pods.pod_state import IsolationStatus, PathTestRecord, PathTestResult, PodState
from bpf.verdicts import Mode

ENFORCED = "Enforced"
"""The reason for attached gates that drop; with a relay it becomes "Strict"."""
STRICT = "Strict"
"""The same where a relay proxies the kubelet's connections."""
AUDITED = "Audit"
"""The reason for attached gates that only count."""

GATE_LOST = "GateLost"
"""The reason where a gate is gone and cannot be attached again yet: what it was True for stays, so
that the pod stays Ready, but nothing is enforced."""

_UNIDENTIFIED = "the kubelet is not identified, so its connections reach the pod as in enforce."

_MODES = {AUDITED: Mode.AUDIT, ENFORCED: Mode.ENFORCE, STRICT: Mode.STRICT}


def isolation_status(
    state: PodState,
    relay_problem: str | None,
    *,
    has_fallback: bool = True,
    kubelet_problem: str = "",
    relay_need: str = "",
    relay_note: str = "",
    is_path_blocked: bool = False,
) -> IsolationStatus | None:
    """The condition's content; None while the first path test of its sandbox is under way.

    relay_problem: one sentence about why the relay does not proxy to this pod, None where it does.
    has_fallback: whether gates of pods in strict admit the kubelet then.
    kubelet_problem: one sentence if the gate cannot distinguish the kubelet; else empty.
    relay_need: why a pod in enforce needs the relay, as a clause; empty if it does not.
    relay_note: one sentence about what the relay does for this pod; else empty.
    is_path_blocked: `is_path_blocked` of the node's pods; then the status does not wait for the
    first path test, which takes most of a second without a response.
    """
    if state.status is None:
        return None
    status = state.status
    if status.reason == ENFORCED and state.pod.mode is Mode.STRICT:
        # The relay is the identified kubelet's alone.
        problem = relay_problem or (_UNIDENTIFIED if kubelet_problem else None)
        is_open = has_fallback or bool(kubelet_problem)
        status = _with_relay(status, problem, has_fallback=is_open)
    elif status.reason == ENFORCED and relay_need:
        status = _with_message(status, _explain_need(relay_need, relay_problem))
    if status.reason in (ENFORCED, STRICT) and relay_note and relay_problem is None:
        status = _with_message(status, relay_note)
    if kubelet_problem and state.status.reason == ENFORCED:
        status = _with_message(status, kubelet_problem)
    if status.status != TRUE or not state.is_path_tested:
        return status
    tested = state.current_path_test
    is_trusted = state.trusted_netns == state.gated_netns
    if tested is None:
        return status if is_trusted or is_path_blocked else None
    if tested.worst is None and state.claims.is_settling and not is_trusted:
        return None
    if tested.worst in (None, PathTestResult.CONFIRMED):
        return status
    explanation = _explain(tested)
    if tested.worst is PathTestResult.BYPASSED and not is_trusted:
        return IsolationStatus(FALSE, "GateBypassed", f"{explanation} {status.message}")
    return _with_message(status, explanation)


def mode_in_force(condition: Condition | None) -> Mode:
    """The mode that a pod's condition shows. Off: it has no gate, or one that is bypassed."""
    if condition is None or condition.status != TRUE:
        return Mode.OFF
    return _MODES.get(condition.reason, Mode.OFF)


def is_path_blocked(states: Iterable[PodState]) -> bool:
    """Whether packets of the host reach none of these pods, as far as they are tested: a CNI that
    blocks one pod from the host blocks all."""
    is_blocked = False
    for state in states:
        if tested := state.current_path_test:
            if tested.worst is not PathTestResult.UNREACHABLE:
                return False
            is_blocked = True
    return is_blocked


def is_path_trusted(state: PodState, status: IsolationStatus) -> bool:
    """Whether this status, once published, settles that the sandbox's gates are not bypassed.

    From then on a path test that finds otherwise is reported, and no longer makes it False.
    """
    tested = state.current_path_test if state.is_path_tested else None
    return status.status == TRUE and tested is not None and tested.worst is not None


def _with_relay(
    status: IsolationStatus, problem: str | None, *, has_fallback: bool
) -> IsolationStatus:
    """What the relay adds to attached gates in strict."""
    if problem is None:
        return dataclasses.replace(status, reason=STRICT)
    if not has_fallback:
        status = dataclasses.replace(status, reason=STRICT)
    return _with_message(status, strict_sentence(problem, has_fallback=has_fallback))


def _explain_need(need: str, problem: str | None) -> str:
    """One sentence about a pod in enforce that needs the relay."""
    if problem is None:
        return f"{need}, so the relay proxies the kubelet's connections."
    return f"{need}, and the relay does not proxy the kubelet's connections: {problem}"


def _with_message(status: IsolationStatus, sentence: str) -> IsolationStatus:
    return dataclasses.replace(status, message=f"{status.message} {sentence}")


def _explain(tested: PathTestRecord) -> str:
    """One sentence about the addresses with the worst result."""
    addresses = [address for address, result in tested.results.items() if result is tested.worst]
    if tested.worst is PathTestResult.BYPASSED:
        return bypassed_sentence(addresses)
    if tested.worst is PathTestResult.FAILED:
        return untested_sentence(addresses)
    return f"Path test not confirmed: packets from the host do not reach {', '.join(addresses)}."


def bypassed_sentence(addresses: Iterable[str]) -> str:
    """Of addresses that the path test reached past the gate."""
    listed = ", ".join(addresses)
    return f"The host reaches {listed} without passing the gate; check how the CNI routes them."


def untested_sentence(addresses: Iterable[str]) -> str:
    """Of addresses for which the path test failed itself."""
    return f"Path test failed for {', '.join(addresses)}; see the agent's log."


def strict_sentence(problem: str, *, has_fallback: bool) -> str:
    """Of a pod in strict to which the relay does not proxy."""
    if has_fallback:
        return f"Strict unavailable: {problem}"
    return f"The kubelet's probes fail (--strict-without-fallback): {problem}"
