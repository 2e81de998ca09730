"""Times and names in words."""

import datetime

import pytest

from agent.operate import text

DAY = 86400


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s ago"),
        (119, "119s ago"),
        (120, "2m ago"),
        (119 * 60, "119m ago"),
        (47 * 3600, "47h ago"),
        (2 * DAY, "2d ago"),
        (900 * DAY, "900d ago"),
        (-5, "0s ago"),
    ],
)
def test_age_has_one_unit(seconds: int, expected: str) -> None:
    assert text.ago(datetime.timedelta(seconds=seconds)) == expected


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90s", 90), ("15m", 900), ("24h", DAY), ("7d", 7 * DAY)],
)
def test_duration_is_a_number_and_a_unit(given: str, seconds: int) -> None:
    assert text.read_duration(given) == datetime.timedelta(seconds=seconds)


@pytest.mark.parametrize("given", ["", "90", "1w", "-5m", "1h30m", "9999999s", "5m "])
def test_other_text_is_no_duration(given: str) -> None:
    assert text.read_duration(given) is None


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert text.printable("a\x1b[2Jb\n\u202e") == r"a\x1b[2Jb\n\u202e"
