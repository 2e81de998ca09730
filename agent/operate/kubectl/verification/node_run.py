"""One node's part of a run: its canaries are made and awaited, tried, and deleted."""

import dataclasses
import json
import threading
import time
import urllib.parse
from collections.abc import Sequence

from agent.operate.kubectl.agent_pods import AgentPod
from agent.operate.kubectl.cluster import KubectlError, Object, is_forbidden, is_missing
from agent.operate.kubectl.verification import manifests, results, targets
from agent.operate.kubectl.verification.access import Access
from agent.operate.kubectl.verification.manifests import Image
from agent.operate.kubectl.verification.results import HOLE, NodeResult, Path
from agent.operate.kubectl.verification.targets import Target
from agent.operate.kubectl.verification.tries import MOST

AGENT, POD = "agent", "pod"
_POLL_SECONDS = 1.0
_DELETE_SECONDS = 30.0
# A try takes a second, and 16 run at once; the rest is for the image and the interpreter.
_TRIES_SECONDS = 90
# A canary lives as long as it is awaited and tried.
_MARGIN_SECONDS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Of all nodes.

    :param namespace: podgate's, in which pods on the node's network are made.
    :param canaries: namespace of the canaries.
    :param modes: a canary for each, by its own label; "" for one without, which has its
        namespace's mode.
    :param origin: where tries come from: "pod", "agent", or empty for a pod, and the agent's
        container where such pods are forbidden.
    :param wait_seconds: for canaries to be in their mode.
    """

    run: str
    namespace: str
    canaries: str
    modes: tuple[str, ...]
    image: Image
    origin: str
    wait_seconds: float


class NodeRun:
    """Use its `result` once, and `close` it."""

    def __init__(
        self,
        access: Access,
        plan: Plan,
        node: str,
        agent: AgentPod | None,
        samples: Sequence[Target],
        canary_mode: str,
        end: threading.Event,
    ) -> None:
        """agent: that runs there, or None; canary_mode: of a canary without a label of its own;
        end: set if the run is interrupted."""
        self._access = access
        self._plan = plan
        self._node = node
        self._agent = agent
        self._samples = samples
        self._canary_mode = canary_mode
        self._end = end
        self._made: dict[str, str] = {}
        """Modes of canaries, by name."""

    def result(self) -> NodeResult:
        """It has all problems; raises nothing of its own."""
        problems: list[str] = []
        try:
            canaries = self._canaries(problems)
            tried = [*canaries, *self._samples]
            origin, answers = self._try(tried)
        except KubectlError as error:
            return NodeResult(self._node, problems=(*problems, str(error).rstrip(".")))
        paths = [
            path for target in tried for path in results.of_target(self._node, target, answers)
        ]
        kept = tuple(path for path in paths if path.verdict != HOLE or self._is_same(path))
        return NodeResult(self._node, kept, origin, tuple(problems))

    def close(self) -> str:
        """Delete all pods of this node, and wait until they are gone; a problem, or empty."""
        try:
            for namespace in {self._plan.namespace, self._plan.canaries}:
                for pod in self._pods(namespace):
                    _delete(self._access, pod)
            deadline = time.monotonic() + _DELETE_SECONDS
            left = self._left()
            while left and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                left = self._left()
        except KubectlError as error:
            return f"its pods may be left: {str(error).rstrip('.')}"
        return f"its pods are still ending: {', '.join(left)}" if left else ""

    def _left(self) -> list[str]:
        namespaces = sorted({self._plan.namespace, self._plan.canaries})
        return [pod["metadata"]["name"] for one in namespaces for pod in self._pods(one)]

    def _canaries(self, problems: list[str]) -> list[Target]:
        """Those that run, once they are in their mode or the time is over."""
        plan = self._plan
        life = int(plan.wait_seconds) + _TRIES_SECONDS + _MARGIN_SECONDS
        has_agent = self._agent is not None and not self._agent.problem
        for mode in plan.modes:
            body = manifests.canary(
                *(plan.image, plan.run, self._node),
                mode=mode,
                has_agent=has_agent,
                life_seconds=life,
            )
            try:
                made = self._access.create(f"/api/v1/namespaces/{plan.canaries}/pods", body)
            except KubectlError as error:
                problems.append(f"no canary can be made: {str(error).rstrip('.')}")
                return []
            self._made[made["metadata"]["name"]] = mode or self._canary_mode
        deadline = time.monotonic() + plan.wait_seconds
        while True:
            pods = [
                pod for pod in self._pods(plan.canaries) if pod["metadata"]["name"] in self._made
            ]
            waiting = [pod for pod in pods if not targets.has_condition(pod, "Ready")]
            if not waiting or time.monotonic() >= deadline:
                break
            self._sleep()
        found = []
        for pod in pods:
            name = pod["metadata"]["name"]
            target = targets.of_pod(pod, self._made[name], is_canary=True)
            if target is not None and _is_running(pod):
                found.append(target)
            else:
                problems.append(f"its canary {name} does not run: {_state(pod)}")
        return found

    def _try(self, tried: Sequence[Target]) -> tuple[str, list[Object]]:
        """From where, and the answers."""
        tries = [
            (address, port.protocol, port.number)
            for target in tried
            for address in target.addresses
            for port in target.ports
        ][:MOST]
        if not tries:
            return self._plan.origin or POD, []
        if self._plan.origin != AGENT:
            try:
                return POD, self._try_from_pod(tries)
            except KubectlError as error:
                if self._plan.origin == POD or not is_forbidden(error):
                    raise
        if self._agent is None or self._agent.problem:
            raise KubectlError("pods on its network are forbidden, and no agent runs there")
        command = (*manifests.TRIES, json.dumps(tries))
        return AGENT, _decode(self._access.run(self._plan.namespace, self._agent.name, *command))

    def _try_from_pod(self, tries: Sequence[Sequence[object]]) -> list[Object]:
        body = manifests.prober(
            self._plan.image, self._plan.run, self._node, tries, life_seconds=_TRIES_SECONDS
        )
        pods = f"/api/v1/namespaces/{self._plan.namespace}/pods"
        name = self._access.create(pods, body)["metadata"]["name"]
        deadline = time.monotonic() + _TRIES_SECONDS
        while True:
            pod = self._access.get(f"{pods}/{name}")
            phase = pod.get("status", {}).get("phase")
            if phase == "Succeeded":
                return _decode(self._access.text(f"{pods}/{name}/log"))
            if phase == "Failed" or time.monotonic() >= deadline:
                raise KubectlError(f"its pod {name} does not try anything: {_state(pod)}")
            self._sleep()

    def _sleep(self) -> None:
        if self._end.wait(_POLL_SECONDS):
            raise KubectlError("it was interrupted")

    def _is_same(self, path: Path) -> bool:
        """Whether the pod still had its address: another one may have it by now."""
        target = path.target
        try:
            pod = self._access.get(f"/api/v1/namespaces/{target.namespace}/pods/{target.name}")
        except KubectlError as error:
            return not is_missing(error)
        is_ending = bool(pod["metadata"].get("deletionTimestamp"))
        return pod["metadata"]["uid"] == target.uid and not is_ending

    def _pods(self, namespace: str) -> list[Object]:
        """Of this run on this node."""
        labels = urllib.parse.quote(f"{manifests.RUN_LABEL}={self._plan.run}")
        fields = urllib.parse.quote(f"spec.nodeName={self._node}")
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={labels}&fieldSelector={fields}"
        found: list[Object] = self._access.get(path)["items"]
        return found


def sweep(access: Access, namespace: str) -> None:
    """Delete what a run has left that was killed: its pods end by themselves, and stay as objects.

    Raises `KubectlError`.
    """
    labels = urllib.parse.quote(f"app.kubernetes.io/name={manifests.NAME}")
    fields = urllib.parse.quote("status.phase=Failed")
    path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={labels}&fieldSelector={fields}"
    for pod in access.get(path)["items"]:
        if manifests.RUN_LABEL in pod["metadata"]["labels"]:
            _delete(access, pod)


def _delete(access: Access, pod: Object) -> None:
    metadata = pod["metadata"]
    if metadata.get("deletionTimestamp"):
        return
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
    try:
        access.delete(f"{path}?gracePeriodSeconds=1")
    except KubectlError as error:
        if not is_missing(error):
            raise


def _is_running(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return any("running" in (one.get("state") or {}) for one in statuses)


def _state(pod: Object) -> str:
    """Why its container does not run, or its phase."""
    status = pod.get("status", {})
    for one in status.get("containerStatuses") or ():
        for state in (one.get("state") or {}).values():
            if reason := state.get("reason"):
                message = state.get("message") or ""
                return f"{reason}: {message}".rstrip(": .")
    return str(status.get("reason") or status.get("phase") or "it has no status")


def _decode(output: str) -> list[Object]:
    """Raises `KubectlError`."""
    try:
        return [json.loads(line) for line in output.splitlines() if line.strip()]
    except ValueError as error:
        raise KubectlError(f"its tries printed {output.strip()[-200:]}") from error
