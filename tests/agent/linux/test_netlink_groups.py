"""Messages of a group, some of which the kernel has dropped (netlink(7), ENOBUFS)."""

import errno
import socket
from typing import cast

import pytest

from agent.linux import netlink_groups


class Socket:
    """Receives these, in order, and then nothing."""

    def __init__(self, *received: bytes | OSError) -> None:
        self._received = [*received, BlockingIOError()]

    def recv(self, _: int) -> bytes:
        found = self._received.pop(0)
        if isinstance(found, OSError):
            raise found
        return found


def received(*datagrams: bytes | OSError) -> list[bytes] | None:
    return netlink_groups.received(cast(socket.socket, Socket(*datagrams)))


def test_all_that_waits_is_received() -> None:
    assert received() == []
    assert received(b"one", b"two") == [b"one", b"two"]


def test_after_a_loss_there_is_no_list() -> None:
    lost = OSError(errno.ENOBUFS, "No buffer space available")
    assert received(lost) is None
    assert received(b"one", lost, b"two") is None


def test_another_error_is_raised() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        received(b"one", OSError(errno.EBADF, "Bad file descriptor"))
