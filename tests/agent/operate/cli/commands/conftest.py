"""The servers that commands are tested with."""

from tests.agent.api.services.conftest import served

__all__ = ["served"]
