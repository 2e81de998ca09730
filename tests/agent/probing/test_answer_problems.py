"""A probe that cannot be answered is reported once, and again only when the reason changes."""

import msgspec
import pytest

from agent.pods.events import PodEvents
from agent.pods.pod import Pod
from agent.probing.answer_problems import AnswerProblems
from agent.probing.answers import plan
from tests.agent.probing.answering import ADDRESS, HEALTHZ, OWN_CHECK, http, spec

TLS = spec({"livenessProbe": http("/", scheme="HTTPS")}, {"liveness": OWN_CHECK})
AMBIGUOUS = spec({"livenessProbe": HEALTHZ, "readinessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
WELL = spec({"livenessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
WEB = Pod(uid="uid-web", namespace="shop", name="web", spec=TLS)


@pytest.mark.looptime
async def test_event_is_recorded_once_for_each_reason() -> None:
    events = PodEvents()
    problems = AnswerProblems(events)
    for found in (TLS, TLS, AMBIGUOUS, AMBIGUOUS):
        problems.update(msgspec.structs.replace(WEB, spec=found), plan(found, (ADDRESS,)))
    recorded = await events.next()
    assert [(event.reason, event.container) for event in recorded] == [
        ("ProbeNotAnswered", "app"),
        ("ProbeNotAnswered", "app"),
    ]
    assert "is encrypted" in recorded[0].message
    assert "another check" in recorded[1].message


def test_condition_has_the_problem_as_long_as_it_lasts() -> None:
    problems = AnswerProblems(PodEvents())
    problems.update(WEB, plan(TLS, (ADDRESS,)))
    assert problems.text(WEB.uid).startswith(' Container "app": liveness probe is not answered: ')
    problems.update(WEB, plan(WELL, (ADDRESS,)))
    assert problems.text(WEB.uid) == ""
    problems.update(WEB, plan(TLS, (ADDRESS,)))
    problems.forget(WEB.uid)
    assert problems.text(WEB.uid) == ""
