"""Sources are compiled for the helpers that the kernel offers, each of which is detected."""

import pytest

from bpf import features
from bpf.features import COARSE_CLOCK, CURRENT_TASK, Helper

GATES = (COARSE_CLOCK, CURRENT_TASK)


@pytest.mark.parametrize("missing", CURRENT_TASK.helpers)
def test_task_is_not_read_without_one_of_its_helpers(
    monkeypatch: pytest.MonkeyPatch, missing: Helper
) -> None:
    monkeypatch.setattr(features, "is_offered", lambda helper, kind: helper != missing)
    assert features.offered(GATES) == [COARSE_CLOCK]


def test_with_all_helpers_everything_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "is_offered", lambda helper, kind: True)
    assert features.offered(GATES) == [COARSE_CLOCK, CURRENT_TASK]


def test_compiler_gets_every_macro_of_the_sources() -> None:
    flags = features.compiler_flags(GATES, [COARSE_CLOCK])
    assert flags == ["-DCOARSE_CLOCK=1", "-DHAS_CURRENT_TASK=0"]
