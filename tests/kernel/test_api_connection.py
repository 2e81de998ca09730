"""Connections to an API server whose way is lost without a word."""

import asyncio
import pathlib
import socket
import threading
from collections.abc import Iterator

import pytest

from agent.kube import connection
from agent.lab.lab import Lab, LabPod
from tests import polling
from tests.agent.kube.conftest import opened, write_kubeconfig
from tests.kernel import links

pytestmark = pytest.mark.kernel

_PORT = 8001
_EVENT = b'{"type":"BOOKMARK"}'
_RESPONSE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%s\n\r\n" % (len(_EVENT) + 1, _EVENT)
)
_FOREVER = 1e6


@pytest.fixture
def server(lab: Lab) -> Iterator[LabPod]:
    """Sends one event, and is silent then, as a server without changes."""
    made = lab.add_pod("server", 1)
    ended = threading.Event()

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(65536)
            accepted.sendall(_RESPONSE)
            ended.wait()

    with made.listen(_PORT) as listener:
        listener.settimeout(polling.PATIENCE_SECONDS)
        thread = threading.Thread(target=serve)
        thread.start()
        yield made
        ended.set()
        thread.join()


@pytest.mark.parametrize("version", [4, 6])
async def test_watch_whose_way_is_lost_ends(
    server: LabPod, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
        monkeypatch.setitem(connection._KEEPALIVE, option, 1)
    monkeypatch.setitem(connection._KEEPALIVE, socket.TCP_USER_TIMEOUT, 2000)
    address = server.ipv4 if version == 4 else f"[{server.ipv6}]"
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", f"http://{address}:{_PORT}")
    async with (
        asyncio.timeout(polling.PATIENCE_SECONDS),
        opened(kubeconfig) as api,
        api.stream("/watch", query={}, silence_seconds=_FOREVER) as lines,
    ):
        assert await anext(lines) == _EVENT
        with links.blocked(server):
            assert [line async for line in lines] == []
