"""A lock that another process keeps ends the wait with one sentence."""

import errno
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


def test_lock_is_taken_when_its_holder_ends(
    holder: "subprocess.Popen[bytes]", descriptor: int
) -> None:
    taking = threading.Thread(target=locks.take, args=(descriptor, 30.0))
    taking.start()
    holder.kill()
    taking.join()
    with pytest.raises(errors.BpfError):
        locks.take(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY), 0)
