"""A lock that another process keeps ends the wait with one sentence."""

import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from bpf import errors, locks
from tests.processes import BARE_PYTHON

_HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: pathlib.Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has locked `tmp_path`."""
    command = [*BARE_PYTHON, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


@pytest.fixture
def descriptor(tmp_path: pathlib.Path) -> Iterator[int]:
    opened = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield opened
    os.close(opened)


def test_process_that_is_stopped_is_named(
    holder: "subprocess.Popen[bytes]", descriptor: int, tmp_path: pathlib.Path
) -> None:
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(errors.BpfError) as caught:
        locks.take(descriptor, 0.05)
    assert caught.value.errno == errno.EBUSY
    assert caught.value.strerror == (
        f"process {holder.pid} has kept {tmp_path} locked for more than 0.05 s; it may be stopped "
        "or frozen: let it continue, or end it"
    )


@pytest.mark.parametrize(
    ("lines", "holder"),
    [
        (["1: FLOCK  ADVISORY  WRITE 0 {file} 0 EOF"], "a process of another pid namespace"),
        (["1: FLOCK  ADVISORY  READ 31 {file} 0 EOF"], "process 31"),
        # Other kinds of locks, locks of other files, and a process that waits.
        (
            [
                "1: POSIX  ADVISORY  WRITE 32 {file} 0 EOF",
                "2: FLOCK  ADVISORY  WRITE 33 fd:01:1 0 EOF",
                "3: FLOCK  ADVISORY  WRITE 34 {file} 0 EOF",
                "3: -> FLOCK  ADVISORY  WRITE 35 {file} 0 EOF",
            ],
            "process 34",
        ),
        (["1: -> FLOCK  ADVISORY  WRITE 35 {file} 0 EOF"], "another process"),
        ([], "another process"),
    ],
)
def test_holder_is_found_in_the_kernels_list(
    descriptor: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    holder: str,
) -> None:
    status = tmp_path.stat()
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    content = "".join(f"{line}\n" for line in lines).replace("{file}", file)
    kept = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(kept, fcntl.LOCK_EX)
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, encoding: content)
    try:
        with pytest.raises(errors.BpfError) as caught:
            locks.take(descriptor, 0)
    finally:
        os.close(kept)
    assert caught.value.strerror == (
        f"{holder} has kept {tmp_path} locked for more than 0 s; it may be stopped or frozen: let "
        "it continue, or end it"
    )


def test_lock_is_tried_again_after_a_pause(
    descriptor: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(kept, fcntl.LOCK_EX)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        os.close(kept)

    monkeypatch.setattr("bpf.locks.time.sleep", pause)
    locks.take(descriptor, 0.1)
    assert len(pauses) == 1


def test_lock_is_taken_when_its_holder_ends(
    holder: "subprocess.Popen[bytes]", descriptor: int
) -> None:
    taking = threading.Thread(target=locks.take, args=(descriptor, 30.0))
    taking.start()
    holder.kill()
    taking.join()
    with pytest.raises(errors.BpfError):
        locks.take(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY), 0)
