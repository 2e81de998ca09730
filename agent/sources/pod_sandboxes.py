"""Joins pods and their sandboxes: the API has the spec, the runtime the network namespace.

Either may arrive first or be missing. A pod exists while one of the two has it: after a forced
deletion the API does not have it any more, but its containers may still run. Its last version then
stays in force.
"""

import msgspec

from agent.cri.models import Sandbox
from agent.pods.pod import SANDBOX_MISSING, Pod, Problem
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from probes.spec.specs import DeclaredPorts, PodSpec

_NO_SANDBOX = Problem(SANDBOX_MISSING, "Waiting for the container runtime to create the sandbox.")


class PodSandboxJoin:
    """Writes pods with the paths of their namespaces into the store.

    Pods and sandboxes are joined by the runtime's UID: for a static pod it is the `config.mirror`
    annotation of its mirror.
    """

    def __init__(self, store: PodStore, modes: PodModes) -> None:
        """modes: of sandboxes without a pod, and of pods that the API does not have any more."""
        self._store = store
        self._modes = modes
        self._last: dict[str, Pod] = {}
        """The last version of each pod that exists, without its sandbox."""
        self._published: dict[str, Pod] = {}

    def update(self, uid: str, pod: Pod | None, sandbox: Sandbox | None) -> None:
        """The pod as it is now, and its current sandbox; either may be missing."""
        if pod is not None:
            self._last[uid] = pod
        elif sandbox is not None:
            pod = self._without_api(uid, sandbox)
        else:
            self._last.pop(uid, None)
            self._modes.forget(uid)
            if self._published.pop(uid, None):
                self._store.remove_pod(uid)
            return
        pod = join(pod, sandbox)
        if pod != self._published.get(uid):
            self._published[uid] = pod
            self._store.set_pod(pod)

    def _without_api(self, uid: str, sandbox: Sandbox) -> Pod:
        """A pod that the API does not have: the labels of node and namespace still change."""
        if pod := self._last.get(uid):
            is_host = pod.host_network
            decision = self._modes.of_pod(uid, pod.namespace, pod.labels, host_network=is_host)
            pod = msgspec.structs.replace(pod, is_deleting=True)
        else:
            pod = pod_without_spec(sandbox)
            is_host = sandbox.host_network
            decision = self._modes.of_sandbox(uid, pod.namespace, host_network=is_host)
        return msgspec.structs.replace(
            pod,
            mode=decision.mode,
            mode_problems=decision.problems,
            mode_origin=decision.origin,
            kept_up_to=self._modes.kept_up_to(pod.namespace),
        )


def join(pod: Pod, sandbox: Sandbox | None) -> Pod:
    """The pod with the path of its namespace, or with a problem: why it has none."""
    if pod.host_network:
        return pod
    if sandbox is None:
        return _with_problem(pod, _NO_SANDBOX)
    if sandbox.host_network:
        return msgspec.structs.replace(pod, host_network=True)
    if sandbox.netns is None:
        return _with_problem(pod, Problem("NetnsNotFound", sandbox.problem))
    return msgspec.structs.replace(
        pod, netns_path=sandbox.netns.path, reported_addresses=sandbox.ips
    )


def pod_without_spec(sandbox: Sandbox) -> Pod:
    """A pod without an API object, and without its mode: the kubelet may reach all of its ports,
    since its probes and hooks are unknown."""
    return Pod(
        uid=sandbox.pod_uid,
        namespace=sandbox.pod_namespace,
        name=sandbox.pod_name,
        host_network=sandbox.host_network,
        spec=PodSpec(declared=DeclaredPorts(any_port=True)),
        source="runtime",
        has_spec=False,
    )


def _with_problem(pod: Pod, problem: Problem) -> Pod:
    """Adds a problem; the reason of one that the pod already has stays."""
    if own := pod.manifest_problem:
        problem = Problem(own.reason, f"{own.message} {problem.message}")
    return msgspec.structs.replace(pod, netns_path=None, manifest_problem=problem)
