"""The servers that commands are tested with."""

from tests.agent.services.api.conftest import served

__all__ = ["served"]
