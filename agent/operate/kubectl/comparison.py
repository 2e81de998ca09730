"""What mode strict would change for pods: podgate's own results beside the kubelet's. No I/O.

In strict the kubelet's probes take the way of podgate's: from inside the pod. So a probe that fails
for podgate and passes for the kubelet fails in strict: it names a port at which nothing listens,
and a proxy of a mesh accepts it from outside; or rules in the pod drop what comes from inside.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.operate.kubectl.cluster import Object
from agent.operate.text import printable

PodName = tuple[str, str]
"""Namespace and name."""

_STARTUP, _READINESS = "Startup", "Readiness"


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeId:
    """One probe of one container, which has run for `restarts` times before."""

    pod: PodName
    uid: str
    container: str
    kind: str
    restarts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """own, kubelet: whether it passes; None if that is not known. text: podgate's last message."""

    own: bool | None
    kubelet: bool | None
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Effects:
    """One sentence for each probe or pod. restarts: the kubelet would restart the container;
    unready: the container would not be ready; at_enforce: the relay cannot proxy to the pod;
    unknown: no result to compare."""

    restarts: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()
    at_enforce: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    compared: int = 0
    """Number of probes with results of both."""

    @property
    def is_harmless(self) -> bool:
        return not (self.restarts or self.unready or self.at_enforce or self.unknown)


class Comparison:
    """Samples of one namespace, one after the other, and what they show together."""

    def __init__(self) -> None:
        self._verdicts: dict[ProbeId, Verdict] = {}
        self._restarts: dict[tuple[str, str], int] = {}
        """By pod's uid and container: how often it had restarted in the first sample."""
        self._problems: dict[PodName, str] = {}

    def add(self, reported: Sequence[Object], pods: Sequence[Object]) -> None:
        """One sample. reported: pods as the agents report them; pods: of the API. A probe differs
        if it does in every sample of the same instance of its container."""
        by_uid = {pod["metadata"].get("uid"): pod for pod in pods}
        sampled: dict[ProbeId, Verdict] = {}
        self._problems = {}
        for one in reported:
            pod = by_uid.get(one.get("uid"))
            if pod is None or pod["metadata"].get("deletionTimestamp"):
                continue
            if problem := one.get("strictProblem"):
                self._problems[one["namespace"], one["name"]] = problem
            sampled |= dict(_verdicts(one, pod))
        for probe, verdict in list(sampled.items()):
            before = self._verdicts.get(probe)
            if before and _differs(verdict) and not _differs(before):
                sampled[probe] = before
            # The kubelet's probes may have failed, too: this is no instance that they keep.
            first = self._restarts.setdefault((probe.uid, probe.container), probe.restarts)
            if first != probe.restarts:
                del sampled[probe]
        self._verdicts = sampled

    def effects(self) -> Effects:
        restarts: list[str] = []
        unready: list[str] = []
        unknown: list[str] = []
        compared = 0
        for probe, verdict in sorted(self._verdicts.items(), key=lambda item: _order(item[0])):
            if probe.pod in self._problems or verdict.kubelet is None:
                continue
            name = f"{'/'.join(probe.pod)}, container {probe.container}: {probe.kind} probe"
            if verdict.own is None:
                unknown.append(
                    printable(f"{name} has no result of podgate. {verdict.text}".rstrip())
                )
                continue
            compared += 1
            if _differs(verdict):
                text = f"{name} passes for the kubelet and fails from inside: {verdict.text}"
                (unready if probe.kind == _READINESS else restarts).append(printable(text))
        return Effects(
            tuple(restarts),
            tuple(unready),
            tuple(
                printable(f"{'/'.join(name)}: {problem}")
                for name, problem in sorted(self._problems.items())
            ),
            tuple(unknown),
            compared,
        )


def _sentence(text: str) -> str:
    return f"{text.rstrip('.')}." if text else ""


def _order(probe: ProbeId) -> tuple[PodName, str, str]:
    return probe.pod, probe.container, probe.kind


def _differs(verdict: Verdict) -> bool:
    return verdict.own is False and verdict.kubelet is True


def _verdicts(reported: Object, pod: Object) -> Iterator[tuple[ProbeId, Verdict]]:
    statuses = _statuses(pod)
    for probe in reported.get("probes") or ():
        status = statuses.get(probe["container"])
        if status is None:
            continue
        found = ProbeId(
            (reported["namespace"], reported["name"]),
            reported["uid"],
            probe["container"],
            probe["type"],
            status.get("restartCount", 0),
        )
        has_run = bool(probe.get("successes") or probe.get("failures"))
        passed = {"success": True, "failure": False}.get(probe["result"]) if has_run else None
        text = _sentence(probe.get("lastMessage") or "")
        yield found, Verdict(passed, _of_kubelet(probe["type"], status), text)


def _statuses(pod: Object) -> Mapping[str, Any]:
    """By name; sidecars are among the init containers."""
    status = pod.get("status") or {}
    lists = (status.get("initContainerStatuses"), status.get("containerStatuses"))
    return {one["name"]: one for found in lists for one in found or ()}


def _of_kubelet(kind: str, status: Object) -> bool | None:
    """The kubelet's result, as the container's status shows it. None for one that does not run, and
    for a probe that does not run in it yet.

    A startup probe that has passed once is not run again, so there is nothing to compare with until
    the container starts again: then it has to pass from inside.
    """
    if "running" not in (status.get("state") or {}):
        return None
    if not status.get("started"):
        return False if kind == _STARTUP else None
    return bool(status.get("ready")) if kind == _READINESS else True
