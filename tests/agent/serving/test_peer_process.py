"""The process at the other end of a unix socket, while it lives."""

import os
import pathlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from agent.serving.peer_process import PeerProcess


class Accepted:
    """A connection of a process, on a kernel that may lack pidfds of connections."""

    def __init__(self, pid: int, pidfd: int | None = None) -> None:
        self._pid = pid
        self._pidfd = pidfd

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert level == socket.SOL_SOCKET
        if option == socket.SO_PEERCRED:
            return struct.pack("iII", self._pid, 7, 8)
        if self._pidfd is None:
            raise OSError
        return struct.pack("i", self._pidfd)


def process(accepted: Any) -> PeerProcess | None:
    return PeerProcess.of(accepted)


def own_cgroup() -> str | None:
    lines = pathlib.Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    return next((line[3:] for line in lines if line.startswith("0::")), None)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def test_process_that_connected_has_its_cgroup() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        found = process(one)
        assert found is not None
        assert found.cgroup() == own_cgroup()
        found.close()


def test_process_is_found_by_its_id_without_a_pidfd_of_the_connection() -> None:
    found = process(Accepted(os.getpid()))
    assert found is not None
    assert found.cgroup() == own_cgroup()
    found.close()
    found.close()
    assert found.cgroup() is None


@pytest.mark.parametrize("pid", [0, -1])
def test_process_that_is_not_visible_here_is_none(pid: int) -> None:
    assert process(Accepted(pid)) is None


def test_process_that_has_ended_has_no_cgroup(child: subprocess.Popen[bytes]) -> None:
    found = process(Accepted(child.pid, os.pidfd_open(child.pid)))
    assert found is not None
    assert found.cgroup() == own_cgroup()
    child.kill()
    child.wait()
    assert found.cgroup() is None
    found.close()
    assert process(Accepted(child.pid)) is None


def test_descriptor_is_closed_once() -> None:
    pidfd = os.pidfd_open(os.getpid())
    found = process(Accepted(os.getpid(), pidfd))
    assert found is not None
    found.close()
    again = os.open("/dev/null", os.O_RDONLY)
    assert again == pidfd
    found.close()
    os.close(again)
