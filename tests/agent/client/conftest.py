"""The servers that clients are tested with."""

from tests.agent.api.podinfo.conftest import node
from tests.agent.services.api.conftest import channel, client, served

__all__ = ["channel", "client", "node", "served"]
