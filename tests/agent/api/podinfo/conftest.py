"""A node of the test's own."""

from collections.abc import Iterator

import pytest
import structlog.testing

from tests.agent.api.podinfo.serving import Node, directory_for_all


@pytest.fixture
def node() -> Iterator[Node]:
    """Its server runs inside `node.serving()`."""
    # Each change is a line of the agent's log.
    with directory_for_all() as directory, structlog.testing.capture_logs():
        yield Node(directory)
