"""Before a write that could reuse what a program still reads, programs are waited for."""

import pytest

from bpf import rcu_map
from bpf.rcu_map import RcuMap


class _Table:
    """What `RcuMap` uses of a map."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.writes: list[bytes] = []

    def get(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    def set(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        self.writes.append(value)

    def delete(self, key: bytes) -> bool:
        return self.values.pop(key, None) is not None


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    made: list[None] = []
    monkeypatch.setattr(rcu_map, "wait_for_programs", lambda: made.append(None))
    return made


def make(table: _Table) -> RcuMap:
    return RcuMap(table)  # type: ignore[arg-type]


def test_first_write_waits_for_what_a_writer_before_may_have_replaced(waits: list[None]) -> None:
    written = make(_Table())
    written.set(b"a", b"1")
    assert len(waits) == 1


def test_new_keys_need_no_wait(waits: list[None]) -> None:
    written = make(_Table())
    for key in (b"a", b"b", b"c"):
        written.set(key, b"1")
    assert len(waits) == 1


def test_write_after_a_replacement_waits_whatever_its_key(waits: list[None]) -> None:
    written = make(_Table())
    written.set(b"a", b"1")
    written.set(b"a", b"2")
    assert len(waits) == 1
    written.set(b"b", b"1")
    assert len(waits) == 2
    written.set(b"c", b"1")
    assert len(waits) == 2


def test_what_is_there_already_is_not_written(waits: list[None]) -> None:
    table = _Table()
    written = make(table)
    for _ in range(3):
        written.set(b"a", b"1")
    assert table.writes == [b"1"]
    assert len(waits) == 1


def test_the_kernel_waits_or_the_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("bpf.rcu_map.time.sleep", slept.append)
    rcu_map.wait_for_programs()
    assert slept == []
    monkeypatch.setattr("bpf.rcu_map.platform.machine", lambda: "abacus")
    rcu_map.wait_for_programs()
    assert slept == [pytest.approx(0.1)]
