"""A node of the test's own."""

from collections.abc import Iterator

import pytest
import structlog.testing

from agent.kube.client import ApiClient
from tests import unprivileged
from tests.agent.api.conditions.node import Node
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, server

__all__ = ["api", "kubeconfig", "listening", "server"]


@pytest.fixture
def node(server: ApiServer, api: ApiClient) -> Iterator[Node]:
    """Its agent runs inside `node.agent()`."""
    # Each change is a line of the agent's log.
    with unprivileged.visible_directory() as directory, structlog.testing.capture_logs():
        yield Node(directory, server, api)
