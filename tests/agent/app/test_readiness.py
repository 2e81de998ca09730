"""The ready file exists while the agent holds the node and is ready."""

import asyncio
import contextlib
import itertools
import pathlib
from collections.abc import AsyncIterator

import pytest

from agent.app import readiness
from agent.app.readiness import Readiness, TakeOverError

pytestmark = pytest.mark.looptime


class Agent:
    """One whose problem the test sets."""

    def __init__(self, directory: pathlib.Path | None, *, is_take_over: bool = False) -> None:
        self.problem: str | None = "initial pod sync not finished"
        self.readiness = Readiness(directory, lambda: self.problem, is_take_over=is_take_over)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.readiness.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_file_exists_while_the_agent_is_ready(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ready"
    agent = Agent(tmp_path)
    async with agent.running():
        await asyncio.sleep(1)
        assert not file.exists()
        assert agent.readiness.reason() == "initial pod sync not finished"
        agent.problem = None
        await asyncio.sleep(1)
        assert file.exists()
        assert agent.readiness.reason() is None
        agent.problem = "container runtime down"
        await asyncio.sleep(6)
        assert not file.exists()
        assert agent.readiness.reason() == "container runtime down"
        assert agent.readiness.problem == "container runtime down"
        agent.problem = None
        await asyncio.sleep(1)
        assert file.exists()


async def test_short_problems_of_a_ready_agent_do_not_end_its_readiness(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "ready"
    agent = Agent(tmp_path)
    agent.problem = None
    async with agent.running():
        await asyncio.sleep(1)
        for _ in range(3):
            agent.problem = "pods that changed are being read"
            for _ in range(8):
                await asyncio.sleep(0.5)
                assert file.exists()
                assert agent.readiness.reason() is None
                assert agent.readiness.problem == ""
            agent.problem = None
            await asyncio.sleep(1)


async def test_reading_the_reason_does_not_begin_the_grace() -> None:
    agent = Agent(None)
    agent.problem = None
    async with agent.running():
        await asyncio.sleep(1.2)
        agent.problem = "container runtime down"
        assert agent.readiness.reason() is None
        agent.problem = None
        await asyncio.sleep(0.2)
        agent.problem = "initial pod sync not finished"
        await asyncio.sleep(5.2)
        assert agent.readiness.reason() is None
        await asyncio.sleep(1)
        assert agent.readiness.reason() == "initial pod sync not finished"


async def test_file_stays_on_standby_and_when_the_agent_resumes(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "ready"
    first_turn = Agent(tmp_path)
    first_turn.problem = None
    async with first_turn.running():
        await asyncio.sleep(1)
    assert file.exists()
    next_turn = Agent(tmp_path)
    async with next_turn.running():
        await asyncio.sleep(55)
        assert file.exists()
        next_turn.problem = None
        await asyncio.sleep(100)
        assert file.exists()
        next_turn.problem = "container runtime down"
        await asyncio.sleep(6)
        assert not file.exists()


async def test_file_is_removed_if_the_agent_resumes_and_is_not_ready(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "ready").touch()
    async with Agent(tmp_path).running():
        await asyncio.sleep(65)
        assert not (tmp_path / "ready").exists()


def test_file_of_a_killed_agent_is_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ready").touch()
    readiness.remove(tmp_path)
    readiness.remove(tmp_path)
    assert not (tmp_path / "ready").exists()


async def test_without_a_directory_there_is_no_file() -> None:
    agent = Agent(None)
    agent.problem = None
    async with agent.running():
        await asyncio.sleep(1)
        assert agent.readiness.problem == ""


async def test_take_over_fails_if_the_agent_is_not_ready_within_a_minute() -> None:
    agent = Agent(None, is_take_over=True)
    async with agent.running():
        await asyncio.sleep(55)
        agent.readiness.check_take_over()
        await asyncio.sleep(10)
        assert agent.readiness.overdue.is_set()
        with pytest.raises(TakeOverError, match="initial pod sync not finished; the previous"):
            agent.readiness.check_take_over()


async def test_take_over_has_succeeded_once_the_agent_was_ready() -> None:
    agent = Agent(None, is_take_over=True)
    async with agent.running():
        agent.problem = None
        await asyncio.sleep(1)
        agent.problem = "container runtime down"
        await asyncio.sleep(1000)
        assert not agent.readiness.overdue.is_set()


async def test_agent_without_a_previous_one_has_any_time() -> None:
    agent = Agent(None)
    async with agent.running():
        await asyncio.sleep(1000)
        assert not agent.readiness.overdue.is_set()


async def test_file_is_written_again_every_few_seconds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet, or a person, may have removed it."""
    written: list[float] = []
    now = asyncio.get_running_loop().time
    monkeypatch.setattr(readiness, "create", lambda directory: written.append(now()))
    agent = Agent(tmp_path)
    agent.problem = None
    async with agent.running():
        await asyncio.sleep(60)
    assert {round(after - before) for before, after in itertools.pairwise(written)} == {4}
