"""How `podgate off --node` waits for the agent."""

import contextlib
import pathlib

import msgspec
import pytest

from agent.linux import locks
from agent.operate.cli.commands import off
from agent.settings import admin_socket
from bpf import pins
from tests.agent.operate.cli import reports
from tests.agent.operate.cli.stub_agent import HungAgent, StubAgent

DONE = {
    "/status": msgspec.json.encode(
        msgspec.structs.replace(reports.STATUS, max_mode="off", in_force=[])
    )
}


def test_slow_agent_is_awaited_for_the_whole_timeout(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(off, "_AGENT_SECONDS", 0.1)
    with StubAgent(tmp_path, DONE, seconds=0.5):
        assert off._is_done(off._follower(tmp_path, pins.Pins(tmp_path), 60))


def test_hung_agent_is_awaited_no_longer_than_the_timeout(tmp_path: pathlib.Path) -> None:
    with HungAgent(admin_socket(tmp_path)):
        assert off._follower(tmp_path, pins.Pins(tmp_path), 0) is None


def test_missing_agent_is_not_awaited(tmp_path: pathlib.Path) -> None:
    assert off._follower(tmp_path, pins.Pins(tmp_path), 3600) is None


def test_agent_that_starts_is_awaited(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds its lock, and does not respond yet."""
    starting = contextlib.ExitStack()
    starting.enter_context(locks.exclusive(tmp_path))

    def start(_: float) -> None:
        starting.close()
        starting.enter_context(StubAgent(tmp_path, DONE))

    monkeypatch.setattr("agent.operate.cli.commands.off.time.sleep", start)
    with starting:
        assert off._is_done(off._follower(tmp_path, pins.Pins(tmp_path), 60))
