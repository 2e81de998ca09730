"""Whose failures failed writes are: a pod's, or the API server's."""

import pytest

from agent.backoff import no_jitter
from agent.kube.client import ApiError
from agent.kube.write_failures import WriteFailures


def error(code: int = 0, *, retry_after_seconds: float = 0.0) -> ApiError:
    return ApiError(f"error {code}", code=code, retry_after_seconds=retry_after_seconds)


@pytest.fixture
def failures() -> WriteFailures:
    return WriteFailures(no_jitter)


@pytest.mark.parametrize("code", [0, 401, 429, 502, 503, 504])
def test_error_of_a_server_that_is_away_pauses_all(failures: WriteFailures, code: int) -> None:
    assert failures.fail("a", error(code), 100.0)
    assert failures.problem == f"error {code}"
    assert failures.resume_at("a") == failures.resume_at("b") == 101.0


@pytest.mark.parametrize("code", [500, 501, 505, 507])
def test_error_that_a_server_has_for_one_request_is_the_pods_until_three_fail(
    failures: WriteFailures, code: int
) -> None:
    for now, pod in ((100.0, "a"), (101.0, "b"), (102.0, "a")):
        assert not failures.fail(pod, error(code), now)
        assert (failures.problem, failures.resume_at(pod)) == ("", 0.0)
    assert failures.fail("c", error(code), 103.0)
    assert failures.problem == f"error {code}"


def test_pods_in_a_row_are_those_since_the_last_success(failures: WriteFailures) -> None:
    for pod in ("a", "b"):
        assert not failures.fail(pod, error(500), 100.0)
    failures.forget("b")
    assert not failures.fail("c", error(500), 101.0)
    failures.succeed("d", 102.0)
    for pod in ("e", "f"):
        assert not failures.fail(pod, error(500), 103.0)
    assert failures.fail("g", error(500), 103.0)


def test_pod_that_fails_while_others_are_written_delays_none(failures: WriteFailures) -> None:
    assert failures.fail("a", error(), 100.0)
    assert not failures.is_failing("a")
    failures.succeed("b", 101.0)
    assert failures.is_failing("a")
    assert not failures.is_failing("b")
    assert failures.problem == ""
    assert not failures.fail("a", error(), 102.0)
    assert (failures.problem, failures.resume_at("b")) == ("", 0.0)
    failures.succeed("a", 103.0)
    assert not failures.is_failing("a")


def test_pauses_double_and_failures_of_one_moment_are_one(failures: WriteFailures) -> None:
    failures.fail("a", error(), 100.0)
    failures.fail("b", error(), 100.5)
    assert failures.resume_at("a") == 101.0
    failures.fail("a", error(), 101.0)
    assert failures.resume_at("a") == 103.0
    failures.succeed("a", 103.0)
    failures.fail("a", error(), 104.0)
    assert failures.resume_at("a") == 105.0


def test_server_may_request_a_longer_pause(failures: WriteFailures) -> None:
    failures.fail("a", error(429, retry_after_seconds=20.0), 100.0)
    assert failures.resume_at("a") == 120.0


def test_pod_that_was_written_before_shows_sooner_whether_the_server_is_back(
    failures: WriteFailures,
) -> None:
    failures.succeed("shows", 90.0)
    for now in (100.0, 101.0, 103.0, 107.0):
        failures.fail("a", error(), now)
    assert failures.resume_at("a") == 115.0
    assert failures.resume_at("shows") == 112.0
    assert failures.order("shows") < failures.order("new") < failures.order("a")
    failures.fail("shows", error(), 112.0)
    assert failures.resume_at("shows") == failures.resume_at("a")


def test_order_does_not_matter_while_writes_succeed(failures: WriteFailures) -> None:
    failures.succeed("a", 1.0)
    assert failures.order("a") == failures.order("new") == (False, False)


def test_pod_that_was_deleted_is_forgotten(failures: WriteFailures) -> None:
    failures.succeed("a", 99.0)
    failures.fail("a", error(500), 100.0)
    failures.succeed("b", 101.0)
    failures.forget("a")
    failures.forget("never seen")
    assert not failures.is_failing("a")
    assert failures.order("a") == (False, False)
    failures.fail("b", error(), 102.0)
    assert failures.order("a") == (False, True)
