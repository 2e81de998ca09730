"""State files: replaced in one step, soon after a change, and at the end."""

import asyncio
import contextlib
import json
import math
import os
import pathlib
import resource
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import structlog

from agent import state_files
from agent.logs import Event
from agent.state_files import StateSaver
from tests.polling import until


@pytest.fixture(autouse=True)
def nothing_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that starts: other tests of this one may have left files unwritten."""
    monkeypatch.setattr(state_files, "_unwritten", state_files._Unwritten())


class Numbers(msgspec.Struct):
    numbers: list[int]


class Saving:
    """A saver of a list of numbers."""

    def __init__(
        self,
        path: pathlib.Path,
        settle_seconds: float,
        bytes_per_second: float = math.inf,
        after: StateSaver | None = None,
    ) -> None:
        self.path = path
        self.numbers: list[int] = []
        self.saver = StateSaver(
            path,
            lambda: Numbers(list(self.numbers)),
            failure=Event.RESULTS_NOT_SAVED,
            settle_seconds=settle_seconds,
            bytes_per_second=bytes_per_second,
            after=after,
        )

    def add(self, number: int) -> None:
        self.numbers.append(number)
        self.saver.mark()

    def content(self) -> list[int] | None:
        if not self.path.exists():
            return None
        return msgspec.json.decode(self.path.read_bytes(), type=Numbers).numbers


@contextlib.asynccontextmanager
async def running(saver: StateSaver) -> AsyncIterator[None]:
    task = asyncio.create_task(saver.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "numbers.json"


async def test_change_is_written_while_running(path: pathlib.Path) -> None:
    saving = Saving(path, 0.001)
    async with running(saving.saver):
        saving.add(1)
        await until("the file is written", lambda: saving.content() == [1])
        saving.add(2)
        await until("the file is replaced", lambda: saving.content() == [1, 2])


async def test_unwritten_change_is_written_at_the_end(path: pathlib.Path) -> None:
    saving = Saving(path, 3600)
    async with running(saving.saver):
        saving.add(1)
        await asyncio.sleep(0)
        assert saving.content() is None
    assert saving.content() == [1]


async def test_changes_within_the_settle_time_are_one_write(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(state_files, "replace", lambda _, content: written.append(content))
    saving = Saving(path, 0.01)
    async with running(saving.saver):
        for number in range(3):
            saving.add(number)
        await until("the file is written", lambda: written)
    assert written == [b'{"numbers":[0,1,2]}']


async def test_unwritten_changes_of_the_file_before_are_written_first(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, bytes]] = []
    monkeypatch.setattr(
        state_files, "replace", lambda path, content: written.append((path.name, content))
    )
    first = Saving(path.with_name("first.json"), settle_seconds=3600)
    second = Saving(path.with_name("second.json"), 0.001, after=first.saver)
    async with running(first.saver), running(second.saver):
        first.add(1)
        second.add(1)
        await until("both are written", lambda: len(written) == 2)
        second.add(2)
        await until("the changed one is written", lambda: len(written) == 3)
    assert written == [
        ("first.json", b'{"numbers":[1]}'),
        ("second.json", b'{"numbers":[1]}'),
        ("second.json", b'{"numbers":[1,2]}'),
    ]


async def test_file_before_is_written_first_also_on_demand(path: pathlib.Path) -> None:
    first = Saving(path.with_name("first.json"), settle_seconds=3600)
    second = Saving(path, settle_seconds=3600, after=first.saver)
    first.add(1)
    await second.saver.save()
    assert first.content() == [1]
    assert second.content() == []


async def test_nothing_is_written_without_a_change(path: pathlib.Path) -> None:
    saving = Saving(path, 0.001)
    async with running(saving.saver):
        pass
    assert saving.content() is None


async def test_write_that_was_interrupted_does_not_replace_the_last(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling `run` leaves its thread behind, here in the middle of encoding."""
    goes_on = threading.Event()
    encode: Callable[[object], bytes] = msgspec.json.encode
    loop_thread = threading.get_ident()

    def slow(content: object) -> bytes:
        if threading.get_ident() != loop_thread:
            goes_on.wait(60)
        return encode(content)

    monkeypatch.setattr("agent.state_files.msgspec.json.encode", slow)
    saving = Saving(path, 0.0)
    async with running(saving.saver):
        saving.add(1)
        await until("the write has started", lambda: saving.saver._writes == 1)
        saving.numbers.append(2)
    assert saving.content() == [1, 2]
    goes_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert saving.content() == [1, 2]


async def test_error_is_logged_and_saving_continues(path: pathlib.Path) -> None:
    path.parent.write_text("a file")
    saving = Saving(path, 0.001)
    async with running(saving.saver):
        with structlog.testing.capture_logs() as logs:
            saving.add(1)
            await until("an error is logged", lambda: logs)
        assert (logs[0]["event"], logs[0]["path"]) == (Event.RESULTS_NOT_SAVED, str(path))
        path.parent.unlink()
        saving.add(2)
        await until("the file is written", lambda: saving.content() == [1, 2])


def test_content_is_read_back(path: pathlib.Path) -> None:
    failure = Event.SAVED_RESULTS_UNREADABLE
    state_files.write(path, Numbers([1, 2]), failure=Event.RESULTS_NOT_SAVED)
    with structlog.testing.capture_logs() as logs:
        assert state_files.read(path, Numbers, failure=failure) == Numbers([1, 2])
        assert state_files.read(path.parent / "other", Numbers, failure=failure) is None
    assert logs == []


@pytest.mark.parametrize("content", ["", "{", '{"numbers": 1}'])
def test_unusable_file_is_logged_and_counts_as_none(path: pathlib.Path, content: str) -> None:
    failure = Event.SAVED_RESULTS_UNREADABLE
    state_files.replace(path, content.encode())
    with structlog.testing.capture_logs() as logs:
        assert state_files.read(path, Numbers, failure=failure) is None
        assert state_files.read(path.parent, Numbers, failure=failure) is None
    assert [line["event"] for line in logs] == [failure, failure]


def test_file_that_would_not_be_read_is_not_written(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "_MAX_BYTES", 100)
    state_files.write(path, Numbers([1]), failure=Event.RESULTS_NOT_SAVED)
    with structlog.testing.capture_logs() as logs:
        state_files.write(path, Numbers([1] * 100), failure=Event.RESULTS_NOT_SAVED)
    assert [line["event"] for line in logs] == [Event.RESULTS_NOT_SAVED]
    found = state_files.read(path, Numbers, failure=Event.SAVED_RESULTS_UNREADABLE)
    assert found == Numbers([1])


def test_replace_makes_a_private_directory_and_file(path: pathlib.Path) -> None:
    state_files.replace(path, b"{}")
    assert path.read_bytes() == b"{}"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.fixture
def full(path: pathlib.Path) -> Iterator[Callable[[], None]]:
    """There is no room where the file is to be; call it to make some."""
    path.parent.write_text("a file")
    yield path.parent.unlink
    path.parent.unlink(missing_ok=True) if path.parent.is_file() else None
    state_files._unwritten.retry()


async def test_what_could_not_be_written_is_written_once_there_is_room(
    path: pathlib.Path, full: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any further change."""
    monkeypatch.setattr(state_files, "_RETRY_SECONDS", 0.01)
    retrying = asyncio.create_task(state_files.run())
    with structlog.testing.capture_logs() as logs:
        for numbers in ([1], [1, 2]):
            content = Numbers(numbers)
            await asyncio.to_thread(
                state_files.write, path, content, failure=Event.RESULTS_NOT_SAVED
            )
        assert state_files.unwritten() == [path]
        full()
        await until("the log", lambda: len(logs) == 2)
    retrying.cancel()
    written = await asyncio.to_thread(path.read_bytes)
    assert json.loads(written) == {"numbers": [1, 2]}
    assert [line["event"] for line in logs] == [Event.RESULTS_NOT_SAVED, Event.STATE_WRITTEN]
    assert state_files.unwritten() == []


@pytest.mark.parametrize("has_other", [False, True])
def test_removed_file_leaves_no_directory_unless_that_has_more(
    path: pathlib.Path, has_other: bool
) -> None:
    state_files.replace(path, b"x")
    path.with_name(f".{path.name}.new").touch()
    if has_other:
        path.with_name("other").touch()
    state_files.remove(path)
    assert path.parent.exists() == has_other
    if has_other:
        assert [one.name for one in path.parent.iterdir()] == ["other"]
    state_files.remove(path)


def test_newer_content_is_never_replaced_by_what_could_not_be_written(
    path: pathlib.Path, full: Callable[[], None]
) -> None:
    state_files.write(path, Numbers([1]), failure=Event.RESULTS_NOT_SAVED)
    full()
    state_files.write(path, Numbers([2]), failure=Event.RESULTS_NOT_SAVED)
    assert state_files.unwritten() == []
    state_files._unwritten.retry()
    assert json.loads(path.read_bytes()) == {"numbers": [2]}


def test_failed_write_leaves_no_part_of_it(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_files.replace(path, b"{}")
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            state_files.replace(path, bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"{}"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("prefix", ["", ".{}.new"])
def test_fifo_or_directory_counts_as_none_and_is_replaced(
    path: pathlib.Path, make: Callable[[pathlib.Path], None], prefix: str
) -> None:
    """A FIFO has no writer here, so a reader of it would hang."""
    path.parent.mkdir()
    make(path.with_name(prefix.format(path.name) or path.name))
    before = os.listdir("/proc/self/fd")
    with structlog.testing.capture_logs():
        failure = Event.SAVED_RESULTS_UNREADABLE
        assert state_files.read(path, Numbers, failure=failure) is None
    assert os.listdir("/proc/self/fd") == before
    state_files.replace(path, b"{}")
    assert path.read_bytes() == b"{}"


@pytest.mark.looptime
async def test_large_content_is_written_less_often(path: pathlib.Path) -> None:
    saving = Saving(path, settle_seconds=0.5, bytes_per_second=1)
    async with running(saving.saver):
        saving.add(1)
        await until("the first write", lambda: saving.content() == [1])
        saving.add(2)
        # {"numbers":[1]} has 15 bytes.
        await asyncio.sleep(14)
        assert saving.content() == [1]
        await until("the next one", lambda: saving.content() == [1, 2])
