"""An API server, and a client that is configured for it by a kubeconfig."""

import json
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from agent.kube import connection
from agent.kube.client import ApiClient
from tests.agent.kube.apiserver import ApiServer


def write_kubeconfig(
    path: pathlib.Path, server: str = "http://server", *, token: str = "secret"
) -> str:
    content = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": token}}],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@asynccontextmanager
async def opened(kubeconfig: str | None = None) -> AsyncIterator[ApiClient]:
    api = await ApiClient.open(kubeconfig)
    try:
        yield api
    finally:
        await api.aclose()


@pytest.fixture
def listening(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where every client of the test finds its server."""
    path = tmp_path / "api.sock"
    monkeypatch.setattr(connection, "connector", lambda tls: aiohttp.UnixConnector(str(path)))
    return path


@pytest.fixture
async def server(listening: pathlib.Path) -> AsyncIterator[ApiServer]:
    made = ApiServer()
    async with made.running(listening):
        yield made


@pytest.fixture
def kubeconfig(tmp_path: pathlib.Path) -> str:
    """Of `server`."""
    return write_kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
async def api(server: ApiServer, kubeconfig: str) -> AsyncIterator[ApiClient]:
    async with opened(kubeconfig) as made:
        yield made
