"""What a failed connection to a relay shows of the way there."""

import asyncio
import errno
import ipaddress
import os
import socket

import pytest

from agent.strict import way

_RELAY = ipaddress.ip_address("198.18.64.1")


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ECONNREFUSED, ""),
        (errno.ENOBUFS, ""),
        (errno.ENOMEM, ""),
        (errno.EPERM, "the node cannot send to 198.18.64.1 (Operation not permitted)"),
        (errno.ENETUNREACH, "the node cannot send to 198.18.64.1 (Network is unreachable)"),
    ],
    ids=errno.errorcode.get,
)
async def test_lack_of_memory_shows_no_problem_of_the_way(
    monkeypatch: pytest.MonkeyPatch, number: int, problem: str
) -> None:
    """A relay that is reached would be released, and pods would fall back to enforce."""

    async def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", fail)
    assert await way.find_problem([_RELAY]) == problem


async def test_lack_of_descriptors_shows_no_problem_of_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", fail)
    assert await way.find_problem([_RELAY]) == ""


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ECONNREFUSED, ""),
        (0, "packets from the node to 198.18.64.1 are not answered"),
    ],
)
async def test_response_that_was_there_in_time_counts_however_late_it_is_read(
    monkeypatch: pytest.MonkeyPatch, number: int, problem: str
) -> None:
    """An agent that waits for a CPU reads it after its timer."""

    class Socket(socket.socket):
        def getsockopt(self, *_: object) -> int:  # type: ignore[override]
            return number

    async def wait(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", wait)
    monkeypatch.setattr(socket, "socket", Socket)
    assert await way.find_problem([_RELAY]) == problem


async def test_connect_that_has_not_started_shows_no_process_that_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(socket.socket, "connect", fail)
    assert await way.find_problem([_RELAY]) == ""
