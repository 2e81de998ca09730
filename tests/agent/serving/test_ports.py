"""A port that another process has is tried again, and reported with that process."""

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest
import structlog

from agent.logs import Event
from agent.serving import ports
from agent.serving.ports import ListenError, Port
from tests import polling


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


async def test_port_that_is_taken_is_one_sentence_with_the_process(taken: socket.socket) -> None:
    port = Port(("127.0.0.1", port_of(taken)), "--http-address")
    with pytest.raises(ListenError) as caught:
        await port.open()
    assert str(caught.value) == port.problem
    assert port.problem == (
        f"cannot listen on 127.0.0.1:{port_of(taken)} (Address already in use: process "
        f"{os.getpid()} ({_name()!r}) of user {os.getuid()} listens there); choose another address "
        "with --http-address"
    )
    assert (port.sockets, port.address) == ((), "")


def _name() -> str:
    with open("/proc/self/comm", encoding="utf-8") as file:
        return file.read().rstrip("\n")


async def test_port_that_is_bound_without_a_listener_is_reported_so() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = Port(("127.0.0.1", port_of(bound)), "--http-address")
        with pytest.raises(ListenError, match="a process has bound the port without listening"):
            await port.open()


async def test_address_that_no_interface_has_is_one_sentence() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 198\.18\.250\.250:1 \(Cannot assign"):
        await Port(("198.18.250.250", 1), "--http-address").open()


async def test_port_is_opened_once_it_is_free_and_the_problem_logged_once(
    taken: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_RETRY_SECONDS", 0.01)
    port = Port(("127.0.0.1", port_of(taken)), "--http-address")
    with structlog.testing.capture_logs() as logged:
        opening = asyncio.create_task(port.open_always(Event.HTTP_NOT_SERVED))
        await polling.until("the problem", lambda: bool(logged))
        await asyncio.sleep(0.05)
        taken.close()
        async with asyncio.timeout(30):
            await opening
    assert [line["event"] for line in logged] == [Event.HTTP_NOT_SERVED]
    assert port.problem == ""
    assert port.address == f"127.0.0.1:{port.sockets[0].getsockname()[1]}"
    port.close()
    assert port.address == ""


async def test_address_of_ipv6_is_in_brackets() -> None:
    port = Port(("::1", 0), "--http-address")
    await port.open()
    assert port.address.startswith("[::1]:")
    port.close()
