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
