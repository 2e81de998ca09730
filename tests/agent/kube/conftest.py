"""An API server, and a client that is configured for it by a kubeconfig."""

import json
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.kube.client import Api
from tests.agent.kube.apiserver import ApiServer


def write_kubeconfig(path: pathlib.Path, server: str, *, token: str = "secret") -> str:
    content = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": token}}],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@asynccontextmanager
async def opened(kubeconfig: str | None = None) -> AsyncIterator[Api]:
    api = await Api.open(kubeconfig)
    try:
        yield api
    finally:
        await api.aclose()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    made = ApiServer()
    async with made.running():
        yield made


@pytest.fixture
async def api(server: ApiServer, tmp_path: pathlib.Path) -> AsyncIterator[Api]:
    async with opened(write_kubeconfig(tmp_path / "kubeconfig", server.address)) as made:
        yield made
