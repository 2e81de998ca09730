"""The page of benchmarks is made of the records, and goals are judged by them."""

import pytest

from tests.bench import page, recording
from tests.bench.figures import Figure
from tests.bench.goals import GOALS, Goal
from tests.bench.recording import Machine, Record
from tests.bench.unmet import REASONS

MACHINE = Machine(2, "a processor", 24, "6.18.1", "3.11.2")
GOAL = GOALS[0]


def record(value: float) -> Record:
    figure = Figure(GOAL.bench, GOAL.figure, value, "1/s", (value - 1, value + 1))
    return Record(GOAL.bench, "2026-11-27", "abc1234", 0.2, MACHINE, [figure])


def test_page_is_what_is_made_of_the_records() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.render(recording.all_records())


@pytest.mark.parametrize(("value", "met"), [(GOAL.limit, "yes"), (GOAL.limit + 0.1, "no")])
def test_goal_is_met_up_to_its_limit(value: float, met: str) -> None:
    rows = [line for line in page.render([record(value)]).splitlines() if GOAL.figure in line]
    assert rows[0].endswith(f"| {met} |")
    assert f"{value:g} 1/s" in rows[0]


def test_each_goal_that_is_not_met_has_its_reason() -> None:
    by_bench = {record.bench: record for record in recording.all_records()}
    for goal in page.unmet(by_bench):
        assert [one for one in REASONS if one.is_about(goal.bench, goal.figure)], goal


@pytest.mark.parametrize(("value", "is_shown"), [(GOAL.limit, False), (GOAL.limit + 0.1, True)])
def test_reason_is_shown_while_its_goal_is_not_met(value: float, *, is_shown: bool) -> None:
    (reason,) = (one for one in REASONS if one.is_about(GOAL.bench, GOAL.figure))
    assert (reason.text in page.render([record(value)])) is is_shown


def test_goal_without_a_record_is_shown_as_such() -> None:
    rows = [line for line in page.render([]).splitlines() if "not recorded" in line]
    assert len(rows) == len(GOALS)


def test_goal_of_a_figure_with_a_baseline_limits_the_ratio() -> None:
    figure = Figure("cluster", "seconds", 12.0, "s", (11.0, 13.0), 10.0, 1.2, (1.1, 1.3))
    assert not Goal("cluster", "seconds", 1.15, "a burst").is_met(figure)
    assert Goal("cluster", "seconds", 1.2, "a burst").is_met(figure)
    assert Goal("cluster", "seconds", 1.2, "a rate", is_least=True).is_met(figure)
