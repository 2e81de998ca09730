"""A verdict is the newest single result, of the container that runs, until it ends."""

import pytest

from agent.probing.answered_probes import REASON_MAX_CHARS, AnsweredProbes, CheckedVerdict
from agent.probing.answers import AnswerPlan, ProbeName
from agent.relay.messages import HttpRequest
from probes.protocols.user_agents import PROBE_USER_AGENT
from tests.agent.probing.answering import (
    ADDRESS,
    HEALTHZ,
    LIVENESS,
    OWN_CHECK,
    READINESS,
    check,
    http,
    spec,
)

UID = "uid-web"
SPEC = spec({"livenessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
SECOND = 10**9


@pytest.fixture
def answered() -> AnsweredProbes:
    """With one pod that runs."""
    found = AnsweredProbes()
    found.set_pod(UID, SPEC, (ADDRESS,), {"app": "c1"})
    return found


def verdict(answered: AnsweredProbes) -> CheckedVerdict | None:
    (answer,) = answered.answers(UID, ADDRESS)
    return answered.verdict(UID, answer.id)


def test_there_is_none_before_the_first_check(answered: AnsweredProbes) -> None:
    assert verdict(answered) is None


def test_it_is_the_newest_single_result(answered: AnsweredProbes) -> None:
    answered.record(check(UID, finished_ns=1))
    answered.record(check(UID, finished_ns=1, passes=False, message="statuscode: 500"))
    assert verdict(answered) == CheckedVerdict(
        ProbeName("app", LIVENESS), "c1", False, "statuscode: 500", 1, 11 * SECOND + 1
    )


def test_it_ends_a_period_and_a_timeout_after_the_check(answered: AnsweredProbes) -> None:
    answered.record(check(UID, finished_ns=5 * SECOND, valid_seconds=1.25))
    found = verdict(answered)
    assert found is not None
    assert found.ends_ns == 6_250_000_000
    assert found.is_in_force(6_249_999_999)
    assert not found.is_in_force(6_250_000_000)


def test_reason_is_bounded_and_has_no_response_body(answered: AnsweredProbes) -> None:
    answered.record(check(UID, message="a secret of the page"))
    found = verdict(answered)
    assert found is not None
    assert found.reason == ""
    answered.record(check(UID, passes=False, message="x" * 5000))
    found = verdict(answered)
    assert found is not None
    assert len(found.reason) == REASON_MAX_CHARS


@pytest.mark.parametrize("running", [{}, {"app": "c2"}])
def test_it_is_withdrawn_when_the_container_stops_or_restarts(
    answered: AnsweredProbes, running: dict[str, str]
) -> None:
    answered.record(check(UID))
    changes = answered.verdicts.subscribe()
    answered.set_pod(UID, SPEC, (ADDRESS,), running)
    assert verdict(answered) is None
    assert changes.take() == [UID]


def test_check_of_a_container_that_has_ended_does_not_count(answered: AnsweredProbes) -> None:
    answered.set_pod(UID, SPEC, (ADDRESS,), {"app": "c2", "other": "c1"})
    answered.record(check(UID, container_id="c1"))
    assert verdict(answered) is None
    # Nor does one whose container was not known.
    answered.set_pod(UID, SPEC, (ADDRESS,), {"app": ""})
    answered.record(check(UID, container_id=""))
    assert verdict(answered) is None
    answered.set_pod(UID, SPEC, (ADDRESS,), {"app": "c2"})
    answered.record(check(UID, container_id="c2"))
    assert verdict(answered) is not None


def test_result_of_a_superseded_check_is_ignored(answered: AnsweredProbes) -> None:
    answered.record(check(UID, finished_ns=9))
    answered.record(check(UID, finished_ns=3, passes=False))
    found = verdict(answered)
    assert found is not None
    assert found.is_healthy


def test_each_result_is_a_change_since_it_renews_the_end(answered: AnsweredProbes) -> None:
    changes = answered.verdicts.subscribe()
    for second in range(3):
        answered.record(check(UID, finished_ns=second * SECOND))
        assert changes.take() == [UID]


def test_update_without_a_change_keeps_the_verdict(answered: AnsweredProbes) -> None:
    answered.record(check(UID))
    plans, verdicts = answered.plans.subscribe(), answered.verdicts.subscribe()
    answered.set_pod(UID, SPEC, (ADDRESS,), {"app": "c1"})
    assert verdict(answered) is not None
    assert plans.is_empty
    assert verdicts.is_empty


def test_changed_plan_has_no_verdicts(answered: AnsweredProbes) -> None:
    answered.record(check(UID))
    plans, verdicts = answered.plans.subscribe(), answered.verdicts.subscribe()
    other = spec({"livenessProbe": http("/other")}, {"liveness": OWN_CHECK})
    answered.set_pod(UID, other, (ADDRESS,), {"app": "c1"})
    assert verdict(answered) is None
    assert (plans.take(), verdicts.take()) == ([UID], [UID])


def test_change_of_a_check_keeps_the_verdict_until_the_next_one(answered: AnsweredProbes) -> None:
    answered.record(check(UID, passes=False))
    other = spec({"livenessProbe": HEALTHZ}, {"liveness": OWN_CHECK | {"tcp": {"port": 9001}}})
    answered.set_pod(UID, other, (ADDRESS,), {"app": "c1"})
    found = verdict(answered)
    assert found is not None
    assert not found.is_healthy
    answered.record(check(UID, finished_ns=1))
    found = verdict(answered)
    assert found is not None
    assert found.is_healthy


def test_change_of_another_probe_keeps_the_verdict(answered: AnsweredProbes) -> None:
    checks = {"liveness": OWN_CHECK, "readiness": OWN_CHECK}
    for path in ("/ready", "/other"):
        both = spec({"livenessProbe": HEALTHZ, "readinessProbe": http(path)}, checks)
        answered.set_pod(UID, both, (ADDRESS,), {"app": "c1"})
        if path == "/ready":
            answered.record(check(UID))
            answered.record(check(UID, type=READINESS))
    liveness, readiness = (
        answered.verdict(UID, answered.plan(UID).id_of(ProbeName("app", type)) or 0)
        for type in (LIVENESS, READINESS)
    )
    assert liveness is not None
    assert readiness is None


def test_forgotten_pod_has_neither_answers_nor_verdicts(answered: AnsweredProbes) -> None:
    answered.record(check(UID))
    plans, verdicts = answered.plans.subscribe(), answered.verdicts.subscribe()
    answered.forget(UID)
    assert answered.answers(UID, ADDRESS) == ()
    assert (plans.take(), verdicts.take()) == ([UID], [UID])
    answered.record(check(UID))
    assert answered.verdict(UID, 2) is None


def test_pod_without_answers_changes_nothing_when_it_ends() -> None:
    answered = AnsweredProbes()
    plans, verdicts = answered.plans.subscribe(), answered.verdicts.subscribe()
    assert answered.set_pod(UID, spec({}, {}), (ADDRESS,), {}) == AnswerPlan()
    answered.forget(UID)
    answered.forget("unknown")
    assert plans.is_empty
    assert verdicts.is_empty
    assert answered.plan(UID) == AnswerPlan()
    assert answered.verdict(UID, 0) is None


def test_answers_follow_the_addresses_of_the_pod(answered: AnsweredProbes) -> None:
    """What another address gets, may be what another probe sends."""
    plans = answered.plans.subscribe()
    hosts = [{"name": "Host", "value": f"{address}:8080"} for address in (ADDRESS, "198.18.1.2")]
    first, second = (http("/healthz", httpHeaders=[host]) for host in hosts)
    both = spec({"livenessProbe": first, "readinessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
    answered.set_pod(UID, both, ("198.18.1.2",), {"app": "c1"})
    assert len(answered.answers(UID, "198.18.1.2")) == 1
    assert plans.take() == [UID]
    answered.set_pod(UID, both, (ADDRESS,), {"app": "c1"})
    assert answered.answers(UID, ADDRESS) == ()
    assert plans.take() == [UID]
    assert second != first


def test_checks_of_other_types_are_ignored(answered: AnsweredProbes) -> None:
    answered.record(check(UID, type=LIVENESS))
    kept = verdict(answered)
    verdicts = answered.verdicts.subscribe()
    verdicts.take()
    answered.record(check(UID, type=READINESS))
    answered.record(check("unknown"))
    assert verdict(answered) == kept
    assert verdicts.is_empty


def test_requests_have_the_user_agent_of_the_nodes_kubelet(answered: AnsweredProbes) -> None:
    answered.record(check(UID))
    assert answered.needs_user_agent.is_set()
    plans = answered.plans.subscribe()
    answered.set_user_agent(PROBE_USER_AGENT)
    assert plans.is_empty
    answered.set_user_agent("kube-probe/1.33+")
    (answer,) = answered.answers(UID, ADDRESS)
    assert isinstance(answer.request, HttpRequest)
    assert b"\r\nUser-Agent: kube-probe/1.33+\r\n" in answer.request.sent
    assert plans.take() == [UID]
    assert verdict(answered) is None


def test_user_agent_does_not_count_for_other_requests_than_http() -> None:
    answered = AnsweredProbes()
    grpc = spec({"livenessProbe": {"grpc": {"port": 9090}}}, {"liveness": OWN_CHECK})
    answered.set_pod(UID, grpc, (ADDRESS,), {})
    assert len(answered.answers(UID, ADDRESS)) == 1
    assert not answered.needs_user_agent.is_set()
