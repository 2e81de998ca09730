"""Answered probes of all pods: what the relay answers, and the verdicts that it answers with.

A verdict is the result of the latest single check of a probe. It belongs to one instance of the
container, and it ends a period and a timeout after the check, whatever happens to this
process, the relay or the wall clock: the relay compares the end with its own clock at each answer.
"""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import msgspec

from agent.pods.changes import Changes
from agent.probing import answers
from agent.probing.answers import AnswerPlan, ProbeName
from agent.relay.messages import Answer
from probes.engine.checks import Check
from probes.protocols.user_agents import PROBE_USER_AGENT
from probes.results import ProbeOutcome
from probes.spec.specs import HttpGet, PodSpec

REASON_MAX_CHARS = 256
"""The kubelet shows no body of a failed probe; people who connect by hand see it."""


class CheckedVerdict(msgspec.Struct, frozen=True):
    """The latest result of one answer's checks. Times are of CLOCK_BOOTTIME, in nanoseconds."""

    name: ProbeName
    """The probe whose check this was."""
    container_id: str
    is_healthy: bool
    reason: str
    finished_ns: int
    ends_ns: int

    def is_in_force(self, now_ns: int) -> bool:
        return now_ns < self.ends_ns


@dataclasses.dataclass(slots=True)
class _Pod:
    spec: PodSpec
    addresses: tuple[str, ...]
    plan: AnswerPlan = dataclasses.field(default_factory=AnswerPlan)
    running: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verdicts: dict[int, CheckedVerdict] = dataclasses.field(default_factory=dict)


class AnsweredProbes:
    """The plans of pods and their newest verdicts. Written by the probes' manager."""

    def __init__(self) -> None:
        self.plans = Changes()
        """Pods whose answers changed."""
        self.verdicts = Changes()
        """Pods with a new verdict, or with one that is withdrawn."""
        self.needs_user_agent = asyncio.Event()
        """Set once there is an answer for which the kubelet's User-Agent counts."""
        self._user_agent = PROBE_USER_AGENT
        self._pods: dict[str, _Pod] = {}

    def set_pod(
        self, uid: str, spec: PodSpec, addresses: Sequence[str], running: Mapping[str, str]
    ) -> AnswerPlan:
        """addresses: its own; running: the ids of its running containers, by name."""
        pod = self._pods.get(uid)
        own = tuple(addresses)
        if pod is None:
            pod = self._pods[uid] = _Pod(spec, own)
            self._plan(uid, pod)
        elif pod.spec != spec or pod.addresses != own:
            pod.spec, pod.addresses = spec, own
            self._plan(uid, pod)
        pod.running = running
        withdrawn = [
            number
            for number, verdict in pod.verdicts.items()
            if running.get(verdict.name.container) != verdict.container_id
        ]
        for number in withdrawn:
            del pod.verdicts[number]
        if withdrawn:
            self.verdicts.mark(uid)
        return pod.plan

    def set_user_agent(self, text: str) -> None:
        """Of the node's kubelet, as in its http probes."""
        if text != self._user_agent:
            self._user_agent = text
            for uid, pod in self._pods.items():
                self._plan(uid, pod)

    def _plan(self, uid: str, pod: _Pod) -> None:
        plan = answers.plan(pod.spec, pod.addresses, self._user_agent)
        if plan == pod.plan:
            return
        before, pod.plan = pod.plan, plan
        # Those of probes whose request is the same outlive the change (KEP-6318).
        same = {request.id for request in plan.requests if request in before.requests}
        pod.verdicts = {number: one for number, one in pod.verdicts.items() if number in same}
        self.plans.mark(uid)
        self.verdicts.mark(uid)
        if any(isinstance(request.handler, HttpGet) for request in plan.requests):
            self.needs_user_agent.set()

    def forget(self, uid: str) -> None:
        """The pod has no sandbox any more, or another one."""
        pod = self._pods.pop(uid, None)
        if pod is not None and pod.plan.requests:
            self.plans.mark(uid)
            self.verdicts.mark(uid)

    def record(self, check: Check) -> None:
        """A check has finished. One of a container that has ended meanwhile does not count."""
        pod = self._pods.get(check.key.uid)
        name = ProbeName(check.key.container, check.key.type)
        number = pod.plan.id_of(name) if pod else None
        if pod is None or number is None:
            return
        if not check.container_id or pod.running.get(name.container) != check.container_id:
            return
        newest = pod.verdicts.get(number)
        if newest is not None and newest.finished_ns > check.finished_ns:
            return
        pod.verdicts[number] = CheckedVerdict(
            name,
            check.container_id,
            check.outcome.passed,
            _reason(check.outcome),
            check.finished_ns,
            check.finished_ns + round(check.valid_seconds * 1e9),
        )
        self.verdicts.mark(check.key.uid)

    def answers(self, uid: str, address: str) -> tuple[Answer, ...]:
        """What the relay answers at this address of the pod."""
        pod = self._pods.get(uid)
        return tuple(request.answer(address) for request in pod.plan.requests) if pod else ()

    def verdict(self, uid: str, number: int) -> CheckedVerdict | None:
        """The newest verdict of an answer, which may have ended."""
        pod = self._pods.get(uid)
        return pod.verdicts.get(number) if pod else None

    def plan(self, uid: str) -> AnswerPlan:
        pod = self._pods.get(uid)
        return pod.plan if pod else AnswerPlan()


def _reason(outcome: ProbeOutcome) -> str:
    """Why it failed. A success's message is the response's body, which stays private."""
    return "" if outcome.passed else outcome.message[:REASON_MAX_CHARS]
