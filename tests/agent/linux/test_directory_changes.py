"""Changes of a directory are noticed with inotify, and without it by polling."""

import asyncio
import ctypes
import errno
import os
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent.linux import directory_changes, inotify
from agent.logs import Event


class Followed:
    """A directory that is followed; `count` hints so far."""

    def __init__(self, directory: pathlib.Path, **options: Any) -> None:
        self.count = 0
        self._wake = asyncio.Event()
        self._directory, self._options = directory, options

    async def _run(self) -> None:
        async for _ in directory_changes.follow(self._directory, **self._options):
            self.count += 1
            self._wake.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Followed"]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def hint(self) -> None:
        """Wait for one more."""
        async with asyncio.timeout(20):
            await self._wake.wait()
        self._wake.clear()

    @property
    def has_hint(self) -> bool:
        return self._wake.is_set()


def used_up(monkeypatch: pytest.MonkeyPatch, call: str, error: int) -> None:
    """The system call fails, as it does for a user who has no instance or watch left."""

    class Library:
        def __getattr__(self, name: str) -> Any:
            if name != call:
                return getattr(real, name)

            def fail(*_: Any) -> int:
                ctypes.set_errno(error)
                return -1

            return fail

    real = inotify._libc
    monkeypatch.setattr(inotify, "_libc", Library())


async def test_each_kind_of_change_is_a_hint(tmp_path: pathlib.Path) -> None:
    async with Followed(tmp_path).running() as followed:
        await followed.hint()
        (tmp_path / "a").write_text("1")
        await followed.hint()
        (tmp_path / "a").rename(tmp_path / "b")
        await followed.hint()
        (tmp_path / "b").write_text("2")
        await followed.hint()
        (tmp_path / "b").unlink()
        await followed.hint()


@pytest.mark.looptime
async def test_directory_that_does_not_change_costs_nothing(tmp_path: pathlib.Path) -> None:
    async with Followed(tmp_path).running() as followed:
        await asyncio.sleep(1)
        before = followed.count
        await asyncio.sleep(600)
        assert followed.count == before


@pytest.mark.looptime
async def test_hint_comes_after_a_time_without_changes(tmp_path: pathlib.Path) -> None:
    async with Followed(tmp_path, at_least_every_seconds=5).running() as followed:
        await asyncio.sleep(61)
        assert 12 <= followed.count <= 14


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("inotify_init1", errno.EMFILE),
        ("inotify_init1", errno.ENFILE),
        ("inotify_add_watch", errno.ENOSPC),
        ("inotify_add_watch", errno.ENOMEM),
    ],
)
async def test_directory_is_polled_while_inotify_is_used_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    with monkeypatch.context() as context:
        used_up(context, call, error)
        async with Followed(tmp_path).running() as followed:
            await asyncio.sleep(60)
            assert 25 <= followed.count <= 35
            context.undo()
            await asyncio.sleep(70)
            before = followed.count
            await asyncio.sleep(600)
            assert followed.count == before


@pytest.mark.looptime
async def test_missing_directory_is_polled_until_it_is_there(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "later"
    async with Followed(directory).running() as followed:
        await asyncio.sleep(10)
        assert followed.count >= 4
        directory.mkdir()
        await asyncio.sleep(5)
        before = followed.count
        await asyncio.sleep(600)
        assert followed.count == before


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("call", "error", "count"),
    [
        # An instance that is there is not made again.
        ("inotify_init1", errno.EMFILE, 1),
        ("inotify_add_watch", errno.ENOSPC, 2),
    ],
)
async def test_directory_that_is_not_watched_is_logged_once_until_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, count: int
) -> None:
    (tmp_path / "a").mkdir()
    with capture_logs() as logs:
        async with Followed(tmp_path / "a", at_least_every_seconds=5).running():
            for _ in range(2):
                with monkeypatch.context() as context:
                    used_up(context, call, error)
                    await asyncio.sleep(200)
                await asyncio.sleep(200)
        async with Followed(tmp_path / "missing").running():
            await asyncio.sleep(200)
    expected = {
        "event": Event.DIRECTORY_NOT_WATCHED,
        "log_level": "warning",
        "directory": str(tmp_path / "a"),
        "error": os.strerror(error),
    }
    assert logs == [expected] * count


async def test_each_write_of_a_file_is_a_hint(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_text("1")
    async with Followed(tmp_path).running() as followed:
        await followed.hint()
        for number in range(3):
            (tmp_path / "a").write_text(str(number))
            await followed.hint()
