"""The server that the client is tested with."""

from tests.agent.services.api.conftest import channel, client, served

__all__ = ["channel", "client", "served"]
