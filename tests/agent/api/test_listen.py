"""Unix sockets of the agent: in directories of their own, which are made."""

import asyncio
import pathlib
import socket
import stat

import pytest
import structlog.testing

from agent.api import listen
from agent.logs import Event
from agent.serving.ports import ListenError


def test_directories_are_made_and_the_last_one_has_the_mode(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run" / "podgate" / "api" / "it.sock"
    with listen.unix_socket(path, directory_mode=0o711, mode=0o666) as bound:
        bound.listen()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_socket_and_mode_of_a_previous_agent_are_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "api" / "it.sock"
    for mode in (0o755, 0o700):
        listen.unix_socket(path, directory_mode=mode, mode=0o600).close()
        assert stat.S_IMODE(path.parent.stat().st_mode) == mode


def test_path_that_cannot_be_used_is_one_sentence(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "it.sock"
    with pytest.raises(ListenError, match=r"cannot create the socket .* choose another directory"):
        listen.unix_socket(path, directory_mode=0o700, mode=0o600)


@pytest.mark.looptime
async def test_socket_that_cannot_be_opened_is_tried_every_ten_seconds() -> None:
    loop = asyncio.get_running_loop()
    started: list[float] = []

    async def serve() -> None:
        started.append(round(loop.time(), 1))
        raise ListenError(f"attempt {len(started)}")

    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(listen.run_always(serve, Event.CONDITIONS_API_NOT_SERVED))
        await asyncio.sleep(25)
        task.cancel()
    first = started[0]
    assert [at - first for at in started] == [0, 10, 20]
    assert [(one["event"], one["error"]) for one in logs] == [
        (Event.CONDITIONS_API_NOT_SERVED, f"attempt {number}") for number in (1, 2, 3)
    ]


def test_socket_that_is_closed_leaves_no_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "api" / "it.sock"
    for is_removed in (False, True):
        bound = listen.unix_socket(path, directory_mode=0o700, mode=0o600)
        if is_removed:
            path.unlink()
        listen.close(bound, path)
        assert bound.fileno() == -1
        assert not list(path.parent.iterdir())
