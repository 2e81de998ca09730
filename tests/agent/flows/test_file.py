"""The file of records: whole lines, whatever happens, and a bounded number of files."""

import contextlib
import datetime
import json
import os
import pathlib
import resource
from collections.abc import Iterator

import pytest

from agent.flows.file import FlowFile
from agent.flows.records import StartRecord

SIZE = len('{"type":"start","time":"2026-01-01T00:00:00Z","node":"n","version":"0"}\n')


def start(number: int) -> StartRecord:
    """Of one digit, so that all lines are equally long."""
    time = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return StartRecord(time=time, node="n", version=str(number))


def numbers(path: pathlib.Path) -> list[int]:
    return [int(json.loads(line)["version"]) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def made(path: pathlib.Path, *, lines: int = 100, files: int = 3) -> Iterator[FlowFile]:
    with contextlib.closing(FlowFile(path, max_bytes=lines * SIZE, files=files)) as file:
        yield file


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files cannot be larger, as on a full disk. Python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_are_appended_over_restarts(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "made" / "deep" / "flows.json"
    for batch in ([1, 2], [3]):
        with made(path) as file:
            file.send([start(number) for number in batch])
    assert numbers(path) == [1, 2, 3]
    assert path.stat().st_mode & 0o777 & ~0o640 == 0


def test_full_file_is_renamed_and_the_oldest_deleted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "flows.json"
    with made(path, lines=2) as file:
        for number in range(9):
            file.send([start(number)])
    found = {one.name: numbers(one) for one in tmp_path.iterdir()}
    assert found == {"flows.json": [8], "flows.json.1": [6, 7], "flows.json.2": [4, 5]}


def test_one_file_alone_starts_again(tmp_path: pathlib.Path) -> None:
    with made(tmp_path / "flows.json", lines=2, files=1) as file:
        for number in range(3):
            file.send([start(number)])
    assert [numbers(one) for one in tmp_path.iterdir()] == [[2]]


@pytest.mark.parametrize("room", [SIZE, SIZE + SIZE // 2])
def test_batch_without_room_leaves_no_part_of_a_line(tmp_path: pathlib.Path, room: int) -> None:
    path = tmp_path / "flows.json"
    with made(path) as file:
        file.send([start(1)])
        with room_for(room), pytest.raises(OSError, match=r"too large|No space"):
            file.send([start(2), start(3)])
        assert numbers(path) == [1]
        file.send([start(2), start(3)])
    assert numbers(path) == [1, 2, 3]


def test_half_line_of_a_killed_agent_is_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "flows.json"
    with made(path) as file:
        file.send([start(1)])
    with path.open("a") as stream:
        stream.write('{"type":"st')
    with made(path) as file:
        file.send([start(2)])
    assert numbers(path) == [1, 2]


@pytest.mark.parametrize("is_deleted", [True, False])
def test_file_that_another_program_takes_away_is_made_again(
    tmp_path: pathlib.Path, is_deleted: bool
) -> None:
    path, away = tmp_path / "flows.json", tmp_path / "away"
    with made(path) as file:
        file.send([start(1)])
        if is_deleted:
            path.unlink()
        else:
            path.rename(away)
        file.send([start(2)])
    assert numbers(path) == [2]
    assert is_deleted or numbers(away) == [1]


def test_what_is_no_file_is_an_error_and_does_not_block(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    other = tmp_path / "other"
    other.touch()
    (tmp_path / "link").symlink_to(other)
    for path in (tmp_path / "fifo", tmp_path / "link", tmp_path):
        with made(path) as file, pytest.raises(OSError, match=r"regular|directory|device|symbolic"):
            file.send([start(1)])
    assert other.read_bytes() == b""


def test_half_line_at_the_end_of_a_long_file_is_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "flows.json"
    lines = ["x" * 999 + "\n"] * 1100
    path.write_text("".join(lines) + "half")
    with made(path, lines=100_000) as file:
        file.send([start(1)])
    found = path.read_text().splitlines(keepends=True)
    assert (found[:-1], json.loads(found[-1])["version"]) == (lines, "1")


def test_line_that_was_never_ended_is_removed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "flows.json"
    path.write_text('{"type":"st')
    with made(path) as file:
        file.send([start(1)])
    assert numbers(path) == [1]


def test_no_descriptor_is_left(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    with made(tmp_path / "fifo") as fifo, pytest.raises(OSError, match="regular"):
        fifo.send([start(0)])
    path = tmp_path / "flows.json"
    with made(path, lines=2) as file:
        for number in range(9):
            file.send([start(number)])
            if number % 3 == 0:
                path.unlink()
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    file.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_first_batch_may_be_larger_than_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "flows.json"
    with made(path, lines=2) as file:
        file.send([start(number) for number in range(3)])
        file.send([start(3)])
    found = {one.name: numbers(one) for one in tmp_path.iterdir()}
    assert found == {"flows.json": [3], "flows.json.1": [0, 1, 2]}
