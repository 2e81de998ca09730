"""What a thousand seeds draw, and that a seed repeats its fault."""

from tests.faults import plans, system_calls
from tests.faults.injecting import INJECTED, NAMED

PLANS = [plans.draw(seed) for seed in range(1, 1001)]


def test_seed_draws_the_same_plan_each_time() -> None:
    assert [plans.draw(plan.seed) for plan in PLANS] == PLANS
    assert len({plan.fault for plan in PLANS}) > 900


def test_a_thousand_seeds_have_each_kind_of_fault() -> None:
    assert {plan.fault.kind for plan in PLANS} == set(INJECTED)
    assert {(plan.fault.kind, plan.fault.detail) for plan in PLANS} >= set(NAMED)
    damaged = {plan.fault.detail for plan in PLANS if plan.fault.kind == "damage"}
    assert {one.partition(": ")[0] for one in damaged} == set(plans.STATE_FILES)
    assert {one.partition(": ")[2] for one in damaged} == set(plans.DAMAGES)


def test_a_thousand_seeds_let_each_class_fail_with_each_of_its_errors() -> None:
    drawn = {
        (call, plan.fault.rule.error)
        for plan in PLANS
        if plan.fault.rule is not None
        for call in plan.fault.rule.calls
    }
    for calls, errors in system_calls.CLASSES.values():
        for error in errors:
            assert any((call, error) in drawn for call in calls)


def test_calls_that_all_fail_do_so_for_less_than_a_heartbeat() -> None:
    for plan in PLANS:
        if plan.fault.rule is not None and plan.fault.rule.every == 1:
            assert plan.fault.seconds < 1
