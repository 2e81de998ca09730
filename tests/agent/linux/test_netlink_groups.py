"""Messages of a group, some of which the kernel has dropped (netlink(7), ENOBUFS)."""

import contextlib
import errno
import os
import socket
import sys
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


_LIST_MEMBERSHIPS = 9
_LINKS, _IPV4_ADDRESSES = 1, 5


def test_socket_is_a_member_of_the_groups_and_blocks_nothing() -> None:
    numbers = set()
    with contextlib.ExitStack() as close:
        for groups in ((_LINKS, _IPV4_ADDRESSES), (_IPV4_ADDRESSES,), ()):
            sock = netlink_groups.joined(socket.NETLINK_ROUTE, groups)
            close.callback(sock.close)
            members = sock.getsockopt(netlink_groups.SOL_NETLINK, _LIST_MEMBERSHIPS, 64)
            expected = sum(1 << group - 1 for group in groups)
            assert int.from_bytes(members, sys.byteorder) == expected
            assert netlink_groups.received(sock) == []
            assert not os.get_inheritable(sock.fileno())
            numbers.add(sock.getsockname()[0])
    # The kernel gives each socket a number of its own.
    assert len(numbers - {0}) == 3


def test_socket_of_a_group_that_does_not_exist_is_closed() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Invalid argument"):
        netlink_groups.joined(socket.NETLINK_ROUTE, (100_000,))
    assert os.listdir("/proc/self/fd") == before


def test_messages_of_all_namespaces_are_received_on_request() -> None:
    option = netlink_groups.SOL_NETLINK, netlink_groups.NETLINK_LISTEN_ALL_NSID
    with contextlib.closing(netlink_groups.joined(socket.NETLINK_ROUTE, (_LINKS,))) as sock:
        assert sock.getsockopt(*option) == 0
        netlink_groups.join_all_namespaces(sock)
        assert sock.getsockopt(*option) == 1
