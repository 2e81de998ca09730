"""Counts of gates, in the bytes of their maps."""

import struct
from collections.abc import Mapping

from bpf import map_specs
from bpf.counters import Counters, labelled
from bpf.verdicts import Reason, Verdict
from tests.bpf.pinned import Map, loaded

PASS, DROP, WOULD_DROP = Verdict.PASS, Verdict.DROP, Verdict.WOULD_DROP
# src/abi.h: numbers of reasons, and slots of the host's counts.
RULE, NODE, STRICT = 4, 11, 19
HOST, FALLBACK, GATE = 0, 1, 2


def u32(number: int) -> bytes:
    return struct.pack("=I", number)


def counts(decided: Mapping[int, int], would_drop: Mapping[int, int] | None = None) -> bytes:
    """32 reasons, decided and then in audit."""
    numbers = [decided.get(reason, 0) for reason in range(32)]
    numbers += [(would_drop or {}).get(reason, 0) for reason in range(32)]
    return struct.pack("=64Q", *numbers)


def frequent(*of_cpus: tuple[int, int]) -> bytes:
    """Of each CPU established and node."""
    return b"".join(struct.pack("=QQ", *each) for each in of_cpus)


def counters() -> Counters:
    slots = {
        HOST: counts({STRICT: 1, 14: 2}),
        FALLBACK: counts({STRICT: 10}),
        GATE: counts({RULE: 5, NODE: 1}, {NODE: 7, STRICT: 8}),
        3: counts({}),
    }
    of_cpus = {
        HOST: frequent((0, 0), (0, 0)),
        FALLBACK: frequent((0, 0), (0, 3)),
        GATE: frequent((100, 20), (200, 30)),
        3: frequent((0, 0), (0, 0)),
    }
    maps = {
        map_specs.GATE_SLOTS: Map({u32(8): u32(GATE), u32(9): u32(3)}),
        map_specs.COUNTERS: Map({u32(slot): value for slot, value in slots.items()}),
        map_specs.FREQUENT_COUNTS: Map({u32(slot): value for slot, value in of_cpus.items()}),
    }
    return Counters(loaded(maps))


OF_GATE = {
    (PASS, Reason.RULE): 5,
    (PASS, Reason.ESTABLISHED): 300,
    (DROP, Reason.NODE): 51,
    (WOULD_DROP, Reason.NODE): 7,
    (WOULD_DROP, Reason.STRICT): 8,
}


def test_gate_has_its_own_counts_and_those_of_all_cpus() -> None:
    assert counters().all_gates() == {8: OF_GATE, 9: {}}
    assert counters().of_gate(8) == OF_GATE
    assert counters().of_gate(7) == {}


def test_one_count_is_read_by_itself() -> None:
    found = counters()
    assert found.of_reason(8, PASS, Reason.RULE) == 5
    assert found.of_reason(8, WOULD_DROP, Reason.STRICT) == 8
    assert found.of_reason(8, DROP, Reason.STRICT) == 0
    assert found.of_reason(7, PASS, Reason.RULE) == 0


def test_host_has_the_sum_of_what_no_gate_counts() -> None:
    assert counters().of_host() == {
        (DROP, Reason.STRICT): 11,
        (DROP, Reason.EVASION): 2,
        (DROP, Reason.NODE): 3,
    }


def test_counts_have_the_labels_of_their_verdicts_and_reasons() -> None:
    assert labelled(OF_GATE) == {
        "pass": {"established": 300, "rule": 5},
        "drop": {"node": 51},
        "would-drop": {"node": 7, "strict": 8},
    }
