"""Reports answered probes that cannot be answered: once each in the log, and in the pod's condition
as long as it is so."""

from collections.abc import Mapping

import structlog

from agent.logs import Event
from agent.pods.pod import Pod
from agent.probing.answers import AnswerPlan, ProbeName

log = structlog.get_logger(__name__)


class AnswerProblems:
    """By pod: one sentence for each of these probes."""

    def __init__(self) -> None:
        self._problems: dict[str, Mapping[ProbeName, str]] = {}

    def update(self, pod: Pod, plan: AnswerPlan) -> None:
        before = self._problems.get(pod.uid, {})
        self._problems[pod.uid] = problems = plan.problems
        for name, problem in problems.items():
            if before.get(name) == problem:
                continue
            log.warning(
                Event.PROBE_NOT_ANSWERED,
                pod=pod.full_name,
                uid=pod.uid,
                container=name.container,
                probe=name.type.lower(),
                reason=plan.obstacles[name].value,
            )

    def text(self, uid: str) -> str:
        """All of them, for the end of a message."""
        return "".join(f" {problem}" for problem in self._problems.get(uid, {}).values())

    def forget(self, uid: str) -> None:
        self._problems.pop(uid, None)
