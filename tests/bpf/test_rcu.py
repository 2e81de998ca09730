"""The wait for running programs."""

import pytest

from bpf import rcu


def test_the_kernel_waits_or_the_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("bpf.rcu.time.sleep", slept.append)
    rcu.wait_for_programs()
    assert slept == []
    monkeypatch.setattr("bpf.rcu.platform.machine", lambda: "abacus")
    rcu.wait_for_programs()
    assert slept == [pytest.approx(0.1)]


class Kernel:
    """Which calls of the system it gets."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.calls: list[tuple[int, ...]] = []

    def syscall(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.answer


@pytest.mark.parametrize(("answer", "pauses"), [(0, 0), (-1, 1)])
@pytest.mark.parametrize(
    ("machine", "number"),
    [("x86_64", 324), ("aarch64", 283), ("riscv64", 283), ("s390x", 356), ("ppc64le", 365)],
)
def test_the_process_waits_where_the_kernel_cannot(
    monkeypatch: pytest.MonkeyPatch, machine: str, number: int, answer: int, pauses: int
) -> None:
    kernel = Kernel(answer)
    slept: list[float] = []
    monkeypatch.setattr("bpf.rcu.platform.machine", lambda: machine)
    monkeypatch.setattr("bpf.rcu._libc", kernel)
    monkeypatch.setattr("bpf.rcu.time.sleep", slept.append)
    rcu.wait_for_programs()
    assert kernel.calls == [(number, 1, 0, 0)]
    assert len(slept) == pauses
