"""Saved policies: those in force survive a restart, also if a policy has become invalid meanwhile
or the API server is unreachable. All functions block.
"""

import pathlib
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import structlog

from agent import state_files
from agent.logs import Event
from agent.policy.kinds import P, PolicyError, PolicyKind

log = structlog.get_logger(__name__)

T = TypeVar("T")


def read(path: pathlib.Path, kind: type[T]) -> T | None:
    """What the previous run wrote; None if there is no readable file."""
    return state_files.read(path, kind, failure=Event.SAVED_POLICIES_UNREADABLE)


def checked(documents: Iterable[Any], kind: PolicyKind[P], *, source: str) -> tuple[P, ...]:
    """The saved policies, except those that are invalid for this version."""
    good = []
    for document in documents:
        try:
            good.append(kind.read(document, source))
        except PolicyError as error:
            log.warning(Event.SAVED_POLICIES_UNREADABLE, error=str(error))
    return tuple(good)


def write(path: pathlib.Path, content: msgspec.Struct) -> None:
    """Replace the file."""
    state_files.write(path, content, failure=Event.POLICIES_NOT_SAVED)
