"""An agent that does not answer: none, one that starts, one that hangs, one that only fails."""

import os
import pathlib
import time

import msgspec
import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Kind
from agent.linux import locks
from agent.operate.pinned import agent_process, findings
from agent.operate.pinned.agent_process import AgentProcess
from bpf import pins
from tests.agent.operate.cli.reports import PINNED


@pytest.mark.parametrize(
    ("pid", "age", "beat", "kind"),
    [
        (0, 0.0, 40.0, kinds.AGENT_DEAD),
        (7, 5.0, 40.0, kinds.AGENT_STARTING),
        (7, 5.0, 5.0, kinds.AGENT_STARTING),
        (7, 5.0, None, kinds.AGENT_STARTING),
        (7, 5.0, 0.5, kinds.AGENT_STARTING),
        (7, 30.0, 20.0, kinds.AGENT_HUNG),
        (7, 600.0, 700.0, kinds.AGENT_HUNG),
        (7, 600.0, None, kinds.AGENT_HUNG),
        (7, 600.0, 0.5, kinds.AGENT_UNREADABLE),
    ],
)
def test_agent_without_an_answer(pid: int, age: float, beat: float | None, kind: Kind) -> None:
    status = msgspec.structs.replace(
        PINNED, agent_pid=pid, agent_age_seconds=age, heartbeat_age_seconds=beat
    )
    assert findings.agent_finding(status).kind == kind.name


def test_process_is_found_by_its_lock(tmp_path: pathlib.Path) -> None:
    assert agent_process.find(tmp_path) is None
    with locks.exclusive(tmp_path):
        process = agent_process.find(tmp_path)
        assert process is not None
        assert process.pid == os.getpid()
        assert 0 < process.age_seconds < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert agent_process.find(tmp_path) is None


def test_agent_that_starts_for_the_first_time_has_no_pins(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process, kind in (
        (None, kinds.AGENT_MISSING),
        (AgentProcess(7, 5.0), kinds.AGENT_STARTING),
        (AgentProcess(7, 600.0), kinds.AGENT_MISSING),
    ):
        monkeypatch.setattr(agent_process, "find", lambda _, found=process: found)
        (only,) = findings.without_pins(pins.Pins(tmp_path), tmp_path, "no agent responds")
        assert only.kind == kind.name
