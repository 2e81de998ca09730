"""Sources are compiled for the helpers that the kernel offers, each of which is detected."""

import pytest

from bpf import features
from bpf.features import Helper

TASK = (Helper.GET_CURRENT_CGROUP_ID, Helper.GET_CURRENT_PID_TGID, Helper.GET_CURRENT_COMM)


@pytest.mark.parametrize("missing", TASK)
def test_task_is_not_read_without_one_of_its_helpers(
    monkeypatch: pytest.MonkeyPatch, missing: Helper
) -> None:
    monkeypatch.setattr(features, "is_offered", lambda helper: helper != missing)
    assert features.compiler_flags() == ["-DHAS_CURRENT_TASK=0", "-DCOARSE_CLOCK"]


def test_with_all_helpers_everything_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "is_offered", lambda helper: True)
    assert features.compiler_flags() == ["-DHAS_CURRENT_TASK=1", "-DCOARSE_CLOCK"]
