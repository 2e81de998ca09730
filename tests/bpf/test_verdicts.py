"""Modes, verdicts and reasons have the C side's names and numbers."""

import enum

import pytest

from bpf import abi
from bpf.verdicts import Mode, Reason, Verdict
from tests.bpf import headers


@pytest.mark.parametrize(
    ("twin", "name", "count"),
    [
        (Mode, "mode", None),
        (Verdict, "verdict", "VERDICT_COUNT"),
        (Reason, "reason", "REASON_COUNT"),
    ],
)
def test_enum_is_the_twin_of_the_c_enum(
    twin: type[enum.IntEnum], name: str, count: str | None
) -> None:
    ours = {f"{name.upper()}_{member.name}": member.value for member in twin}
    if count:
        ours[count] = len(twin)
    theirs = headers.enum(name)
    assert theirs == ours
    assert list(theirs) == list(ours)


def test_counters_have_room_for_every_verdict_and_reason() -> None:
    assert len(Verdict) == abi.VERDICT_COUNT
    assert len(Reason) <= abi.REASON_SLOTS


@pytest.mark.parametrize("mode", Mode)
def test_label_gives_the_mode(mode: Mode) -> None:
    assert Mode.from_label(mode.label) is mode


def test_error_of_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ValueError, match="unknown mode 'closed'; use one of off, audit, enforce"):
        Mode.from_label("closed")


@pytest.mark.parametrize("label", ["Enforce", "ENFORCE", " enforce", ""])
def test_label_of_a_mode_must_match_exactly(label: str) -> None:
    with pytest.raises(ValueError, match="unknown mode"):
        Mode.from_label(label)


def test_labels_are_words_in_lower_case() -> None:
    labels = [member.label for kind in (Mode, Verdict, Reason) for member in kind]
    assert all(label.replace("-", "").isalpha() and label.islower() for label in labels)
    assert Verdict.WOULD_DROP.label == "would-drop"


def test_every_reason_has_a_description_of_one_line() -> None:
    described = {reason: reason.description for reason in Reason}
    assert [reason for reason, text in described.items() if not text or "\n" in text] == []
