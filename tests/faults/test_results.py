"""Which seeds that were not kept are the agent's."""

import collections

import pytest

from tests.faults import plans
from tests.faults.running import Result

LATE = [
    "heartbeat 4.93 s old",
    "no finding watch-broken within 10 s of the fault",
    "not as before after 10 s: the agent does not respond",
    "198.18.1.2:8080 lost: TimeoutError timed out (5.40 s)",
]
WRONG = [
    "fd00:18::2:8080 admitted an intruder (0.00 s)",
    "198.18.1.2:8080 lost: ConnectionRefusedError (0.00 s)",
    "the agent has ended",
    "podgate.io/isolation-ready of pod1, which is well, became False: none",
    "no finding names probes, which failed",
]


def is_conclusive(held_seconds: float, *problems: str) -> bool:
    failed = collections.Counter[str]()
    return Result(plans.draw(1), [*problems], failed, 1.0, [], held_seconds).is_conclusive


@pytest.mark.parametrize("problem", LATE)
def test_what_was_late_is_conclusive_unless_the_machine_held_a_witness_up(problem: str) -> None:
    assert is_conclusive(0.3, problem)
    assert not is_conclusive(3.0, problem)


@pytest.mark.parametrize("problem", WRONG)
def test_what_is_wrong_is_conclusive_however_busy_the_machine_is(problem: str) -> None:
    assert is_conclusive(30.0, problem)
    assert is_conclusive(30.0, LATE[0], problem)


def test_seed_that_was_kept_is_conclusive() -> None:
    assert is_conclusive(30.0)
