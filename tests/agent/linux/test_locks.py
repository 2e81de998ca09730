"""Locks that only this user can hold, and directories that others may not have made."""

import contextlib
import fcntl
import os
import pathlib
import stat

import pytest

from agent.linux import directories, locks
from agent.linux.directories import DirectoryError
from agent.linux.locks import AlreadyRunningError, LockError
from agent.linux.procfs import Procfs


def test_second_process_is_rejected_until_the_first_has_ended(tmp_path: pathlib.Path) -> None:
    with locks.exclusive(tmp_path):
        with pytest.raises(AlreadyRunningError, match=f"another agent is running with {tmp_path}"):
            locks.exclusive(tmp_path).__enter__()
        assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o700
    with locks.exclusive(tmp_path):
        pass


def test_directory_that_does_not_exist_is_used_by_no_process(tmp_path: pathlib.Path) -> None:
    with locks.exclusive_if_present(tmp_path / "nothing"):
        assert not (tmp_path / "nothing").exists()


def test_lock_that_cannot_be_made_is_one_sentence_and_held_by_no_process(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "lock").write_text("a file")
    with pytest.raises(LockError, match="cannot be made"):
        locks.exclusive(tmp_path).__enter__()
    with locks.exclusive_if_present(tmp_path):
        pass


def test_lock_that_its_holder_removed_is_made_again(tmp_path: pathlib.Path) -> None:
    lock = tmp_path / "lock"
    with locks.held(lock) as first:
        lock.rmdir()
        assert not locks.is_current(lock, first)
        with locks.held(lock) as second:
            assert locks.is_current(lock, second)
            assert not locks.is_current(lock, first)


@pytest.mark.parametrize("ends", ["before", "after"])
def test_previous_versions_lock_is_held_although_its_holder_ends_meanwhile(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Before or after its number is read."""
    previous = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(previous, fcntl.LOCK_EX)

    def end(*_: object) -> set[int]:
        monkeypatch.undo()
        os.close(previous)
        return set() if ends == "before" else {1 << 30}

    monkeypatch.setattr(Procfs, "lock_holders", end)
    with locks.exclusive(tmp_path):
        descriptor = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


@pytest.mark.parametrize(("users", "is_agent"), [([0, 0, 0, 0], True), ([1000, 0, 0, 0], False)])
@pytest.mark.parametrize("can_be_made", [True, False])
def test_lock_of_a_previous_version_counts_where_root_alone_holds_it(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    users: list[int],
    is_agent: bool,
    can_be_made: bool,
) -> None:
    if not can_be_made:
        (tmp_path / "lock").touch()
    monkeypatch.setattr(Procfs, "users", lambda self, pid: users)
    previous = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(previous, fcntl.LOCK_EX)
    assert locks.is_held(tmp_path) is is_agent
    expected = (
        pytest.raises(AlreadyRunningError, match=str(tmp_path))
        if is_agent
        else contextlib.nullcontext()
    )
    hold = locks.exclusive if can_be_made else locks.exclusive_if_present
    with expected, hold(tmp_path):
        pass
    os.close(previous)
    with hold(tmp_path):
        pass


def test_lock_is_held_while_another_process_has_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not locks.is_held(tmp_path / "nothing")
    assert not locks.is_held(tmp_path)
    with locks.exclusive(tmp_path):
        assert locks.is_held(tmp_path)
    (tmp_path / "lock").chmod(0o755)
    assert not locks.is_held(tmp_path)

    def vanish(path: pathlib.Path) -> int:
        raise FileNotFoundError(path)

    monkeypatch.setattr(directories, "open_private", vanish)
    assert not locks.is_held(tmp_path)


def test_lock_that_others_can_open_is_not_used(tmp_path: pathlib.Path) -> None:
    (tmp_path / "lock").mkdir()
    before = os.listdir("/proc/self/fd")
    for mode in (0o755, 0o710, 0o701, 0o720):
        (tmp_path / "lock").chmod(mode)
        with pytest.raises(DirectoryError, match=rf"open to other users \(mode {mode:04o}\)"):
            locks.exclusive(tmp_path).__enter__()
    assert os.listdir("/proc/self/fd") == before


def test_link_in_place_of_a_lock_is_not_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LockError):
        locks.exclusive(tmp_path).__enter__()


def test_run_directory_that_others_may_write_to_is_not_used(tmp_path: pathlib.Path) -> None:
    for mode in (0o755, 0o700):
        directories.ensure_own(tmp_path / "a" / "run")
        (tmp_path / "a" / "run").chmod(mode)
    for mode in (0o777, 0o775, 0o757):
        (tmp_path / "a" / "run").chmod(mode)
        with pytest.raises(DirectoryError, match=rf"open to other users \(mode {mode:04o}\)"):
            directories.ensure_own(tmp_path / "a" / "run")


def test_holder_of_a_lock_is_found_and_one_that_waits_is_none(tmp_path: pathlib.Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    status = os.fstat(descriptor)
    file = os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
    assert Procfs().lock_holders(*file) == set()
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    assert Procfs().lock_holders(*file) == {os.getpid()}
    os.close(descriptor)
    name = ":".join([f"{file[0]:02x}", f"{file[1]:02x}", str(file[2])])
    (tmp_path / "locks").write_text(
        f"1: FLOCK  ADVISORY  WRITE 10 {name} 0 EOF\n"
        f"1: -> FLOCK  ADVISORY  WRITE 11 {name} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 12 {name} 0 EOF\n"
    )
    assert Procfs(tmp_path).lock_holders(*file) == {10}
