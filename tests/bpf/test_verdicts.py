"""The Python words are those of the C side, with the same numbers."""

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
def test_mode_is_known_by_its_word(mode: Mode) -> None:
    assert Mode.from_word(mode.word) is mode


def test_unknown_mode_is_one_sentence_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="mode 'closed' is not known; use one of off, audit, enf"):
        Mode.from_word("closed")


@pytest.mark.parametrize("word", ["Enforce", "ENFORCE", " enforce", ""])
def test_word_of_a_mode_is_exact(word: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        Mode.from_word(word)


def test_words_are_for_labels() -> None:
    words = [member.word for kind in (Mode, Verdict, Reason) for member in kind]
    assert all(word.replace("-", "").isalpha() and word.islower() for word in words)
    assert Verdict.WOULD_DROP.word == "would-drop"


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_meaning_of_one_line(reason: Reason) -> None:
    assert reason.meaning
    assert "\n" not in reason.meaning
