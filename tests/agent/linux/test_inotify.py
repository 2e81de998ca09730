"""Watches of directories and of one file, by the kernel's notifications."""

import contextlib
import os
import pathlib
import select
from collections.abc import Callable, Iterator

import pytest

from agent.linux.inotify import DirectoryWatches, FileWatch


def is_readable(watched: DirectoryWatches | FileWatch) -> bool:
    """Whether something happened since the last call."""
    found = bool(select.select([watched], [], [], 0)[0])
    watched.drain()
    return found


@pytest.fixture
def watches() -> Iterator[DirectoryWatches]:
    with contextlib.closing(DirectoryWatches()) as made:
        yield made


def create(directory: pathlib.Path) -> None:
    (directory / "new").touch()


def remove(directory: pathlib.Path) -> None:
    (directory / "a").unlink()


def rename(directory: pathlib.Path) -> None:
    (directory / "a").rename(directory / "b")


def make(directory: pathlib.Path) -> None:
    (directory / "new").mkdir()


def write(directory: pathlib.Path) -> None:
    (directory / "a").write_text("text")


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [(create, True), (remove, True), (rename, True), (make, True), (write, False)],
)
def test_changed_entries_are_noticed(
    tmp_path: pathlib.Path,
    watches: DirectoryWatches,
    change: Callable[[pathlib.Path], None],
    is_seen: bool,
) -> None:
    (tmp_path / "a").touch()
    assert watches.watch_only([tmp_path])
    assert not is_readable(watches)
    change(tmp_path)
    assert is_readable(watches) is is_seen
    assert not is_readable(watches)


def test_written_files_are_noticed_on_request(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").touch()
    with contextlib.closing(DirectoryWatches(reports_writes=True)) as watches:
        watches.watch_only([tmp_path])
        write(tmp_path)
        assert is_readable(watches)


def test_directory_is_new_once_and_after_it_was_made_again(
    tmp_path: pathlib.Path, watches: DirectoryWatches
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    assert [watches.watch_only([one, other]) for _ in range(2)] == [True, False]
    assert (watches.has(one), watches.has(other), watches.problem) == (True, False, "")
    other.mkdir()
    assert watches.watch_only([one, other])
    one.rmdir()
    assert not watches.watch_only([one, other])
    assert not watches.has(one)
    one.mkdir()
    assert watches.watch_only([one, other])
    assert not watches.watch_only([one])
    is_readable(watches)
    create(other)
    assert not is_readable(watches)
    create(one)
    assert is_readable(watches)


def test_file_is_watched_until_it_is_closed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(FileNotFoundError) as caught:
        FileWatch(path)
    assert caught.value.filename == str(path)
    path.touch()
    watch = FileWatch(path)
    assert not is_readable(watch)
    for _ in range(2):
        write(tmp_path)
        assert is_readable(watch)
        assert not is_readable(watch)
    watch.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(watch.fileno())


def test_all_notifications_are_read_at_once(
    tmp_path: pathlib.Path, watches: DirectoryWatches
) -> None:
    """More than one read(2) returns."""
    watches.watch_only([tmp_path])
    for number in range(300):
        (tmp_path / f"{number:0250}").symlink_to("a")
    assert is_readable(watches)
    assert not is_readable(watches)


def test_watch_of_a_file_that_does_not_exist_leaves_no_descriptor(tmp_path: pathlib.Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        FileWatch(tmp_path / "a")
    assert os.listdir("/proc/self/fd") == before


def test_closed_watches_have_no_descriptor() -> None:
    watches = DirectoryWatches()
    assert not os.get_inheritable(watches.fileno())
    watches.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(watches.fileno())
