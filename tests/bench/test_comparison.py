"""A run is worse than its record only if a ratio is outside of all that was recorded."""

import pathlib

import msgspec
import pytest

from tests.bench import comparison, goals, recording
from tests.bench.figures import RATIO, Figure, emit
from tests.bench.goals import Goal


def ratio(value: float, spread: tuple[float, float], name: str = "burst") -> Figure:
    return Figure("bench", name, value, RATIO, spread)


RECORDED = ratio(1.2, (1.0, 1.4))


@pytest.mark.parametrize(("value", "count"), [(1.0, 0), (1.4, 0), (1.41, 1)])
def test_ratio_above_the_recorded_spread_is_a_regression(value: float, count: int) -> None:
    measured = [ratio(value, (value, value))]
    assert len(list(comparison.regressions([RECORDED], measured))) == count


def test_figures_of_a_machine_are_not_compared() -> None:
    before = Figure("bench", "cpu_percent", 1.0, "%", (1.0, 1.0))
    after = Figure("bench", "cpu_percent", 9.0, "%", (9.0, 9.0))
    assert list(comparison.regressions([before], [after])) == []


def test_ratio_that_is_not_measured_any_more_is_a_regression() -> None:
    assert list(comparison.regressions([RECORDED], [])) == ["burst was not measured."]


def test_more_is_better_where_the_goal_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "GOALS", (Goal("bench", "burst", 1, "rate", is_least=True),))
    worse, better = ratio(0.9, (0.9, 0.9)), ratio(2.0, (2.0, 2.0))
    assert len(list(comparison.regressions([RECORDED], [worse]))) == 1
    assert list(comparison.regressions([RECORDED], [better])) == []


def test_figure_with_a_baseline_is_compared_by_its_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emit("bench", "seconds", [11.0, 12.0, 13.0], "s", baseline=[9.0, 10.0, 11.0])
    figure = msgspec.json.decode(capsys.readouterr().out, type=Figure)
    assert figure.compared == (1.2, (1.1, 1.3))


def test_record_is_read_as_it_was_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RECORDED", tmp_path / "recorded")
    assert recording.load("rest") is None
    made = recording.new("rest", 0.25, [RECORDED])
    recording.save(made)
    assert recording.load("rest") == made
    assert recording.all_records() == [made]
