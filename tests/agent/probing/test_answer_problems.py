"""A probe that cannot be answered is reported once, and again only when the reason changes."""

import msgspec
import structlog.testing

from agent.logs import Event
from agent.pods.pod import Pod
from agent.probing.answer_problems import AnswerProblems
from agent.probing.answers import plan
from tests.agent.probing.answering import ADDRESS, HEALTHZ, OWN_CHECK, http, spec

TLS = spec({"livenessProbe": http("/", scheme="HTTPS")}, {"liveness": OWN_CHECK})
AMBIGUOUS = spec({"livenessProbe": HEALTHZ, "readinessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
WELL = spec({"livenessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
WEB = Pod(uid="uid-web", namespace="shop", name="web", spec=TLS)


def test_log_has_each_reason_once() -> None:
    problems = AnswerProblems()
    with structlog.testing.capture_logs() as lines:
        for found in (TLS, TLS, TLS, AMBIGUOUS):
            problems.update(msgspec.structs.replace(WEB, spec=found), plan(found, (ADDRESS,)))
    assert [(line["event"], line["container"], line["reason"]) for line in lines] == [
        (Event.PROBE_NOT_ANSWERED, "app", "tls"),
        (Event.PROBE_NOT_ANSWERED, "app", "ambiguous"),
    ]


def test_changed_reason_of_one_probe_is_logged_beside_that_of_another() -> None:
    problems = AnswerProblems()
    both = {"liveness": OWN_CHECK, "readiness": OWN_CHECK}
    https, http2 = http("/", scheme="HTTPS"), http("/", protocol="HTTP2")
    with structlog.testing.capture_logs() as lines:
        for liveness in (https, http2):
            found = spec({"livenessProbe": liveness, "readinessProbe": https}, both)
            problems.update(WEB, plan(found, (ADDRESS,)))
    assert [(line["pod"], line["uid"], line["probe"], line["reason"]) for line in lines] == [
        ("shop/web", "uid-web", "readiness", "tls"),
        ("shop/web", "uid-web", "liveness", "tls"),
        ("shop/web", "uid-web", "liveness", "http2"),
    ]


def test_condition_has_the_problem_as_long_as_it_lasts() -> None:
    problems = AnswerProblems()
    problems.update(WEB, plan(TLS, (ADDRESS,)))
    assert problems.text(WEB.uid).startswith(' Container "app": liveness probe is not answered: ')
    problems.update(WEB, plan(WELL, (ADDRESS,)))
    assert problems.text(WEB.uid) == ""
    problems.update(WEB, plan(TLS, (ADDRESS,)))
    problems.forget(WEB.uid)
    assert problems.text(WEB.uid) == ""
