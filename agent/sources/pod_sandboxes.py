"""Joins what two sources know of a pod: the API its spec, the runtime its network namespace.

Either may come first, and either may be away. A pod is there for as long as one of them has it:
after a forced deletion the API has forgotten a pod whose containers still run.
"""

import msgspec

from agent.cri.models import Sandbox
from agent.pods.pod import SANDBOX_MISSING, Pod, Problem
from agent.pods.store import PodStore
from bpf.verdicts import Mode
from probes.spec.specs import DeclaredPorts, PodSpec

_NO_SANDBOX = Problem(
    SANDBOX_MISSING, "The container runtime shows no sandbox of this pod yet; waiting for one."
)


class PodSandboxJoin:
    """Takes pods and sandboxes, and tells of pods with the paths of their namespaces.

    Both go by the runtime's UID: that of a static pod's mirror is its `config.mirror` annotation.
    """

    def __init__(
        self,
        store: PodStore,
        *,
        default_mode: Mode,
    ) -> None:
        """default_mode: of a sandbox whose pod is not known yet."""
        self._store = store
        self._default_mode = default_mode
        self._pods: dict[str, Pod] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._deleted: set[str] = set()
        self._told: dict[str, Pod] = {}

    def set_pod(self, pod: Pod) -> None:
        """A pod is new or has changed."""
        self._deleted.discard(pod.uid)
        self._pods[pod.uid] = pod
        self._tell(pod.uid)

    def remove_pod(self, uid: str) -> None:
        """The pod was deleted; while it has a sandbox, what was known of it last stays."""
        if uid in self._sandboxes:
            self._deleted.add(uid)
        else:
            self._pods.pop(uid, None)
            self._tell(uid)

    def set_sandbox(self, sandbox: Sandbox) -> None:
        """A pod's current sandbox is new or has changed."""
        self._sandboxes[sandbox.pod_uid] = sandbox
        self._tell(sandbox.pod_uid)

    def remove_sandbox(self, sandbox: Sandbox) -> None:
        """A pod has no sandbox any more."""
        uid = sandbox.pod_uid
        self._sandboxes.pop(uid, None)
        if uid in self._deleted:
            self._deleted.discard(uid)
            self._pods.pop(uid, None)
        self._tell(uid)

    def _tell(self, uid: str) -> None:
        pod, sandbox = self._pods.get(uid), self._sandboxes.get(uid)
        if pod is None and sandbox is not None:
            pod = undescribed(sandbox, self._default_mode)
        if pod is None:
            if self._told.pop(uid, None):
                self._store.remove_pod(uid)
            return
        found = joined(pod, sandbox)
        if found != self._told.get(uid):
            self._told[uid] = found
            self._store.set_pod(found)


def joined(pod: Pod, sandbox: Sandbox | None) -> Pod:
    """The pod with the path of its namespace, or with a problem that says why there is none."""
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


def undescribed(sandbox: Sandbox, mode: Mode) -> Pod:
    """A pod of which only its sandbox is known: the kubelet may reach any port of it, since nobody
    knows what its probes and hooks are."""
    return Pod(
        uid=sandbox.pod_uid,
        namespace=sandbox.pod_namespace,
        name=sandbox.pod_name,
        mode=mode,
        host_network=sandbox.host_network,
        spec=PodSpec(declared=DeclaredPorts(any_port=True)),
        source="runtime",
        is_described=False,
    )


def _with_problem(pod: Pod, problem: Problem) -> Pod:
    """Beside a problem that the pod has already, whose reason stays."""
    if own := pod.manifest_problem:
        problem = Problem(own.reason, f"{own.message} {problem.message}")
    return msgspec.structs.replace(pod, netns_path=None, manifest_problem=problem)
