"""What was in force, kept in a file, so that a restart undoes it neither where a policy has become
wrong meanwhile nor where the API server is away. All of this blocks.
"""

import pathlib
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import structlog

from agent import state_files
from agent.policy import api_types
from agent.policy.api_types import HostAccessPolicy, Policy, PolicyError

log = structlog.get_logger(__name__)

T = TypeVar("T")


def read(path: pathlib.Path, kind: type[T]) -> T | None:
    """What an earlier run wrote; None where there is nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("policies of an earlier run cannot be read", error=str(error))
        return None


def checked(documents: Iterable[HostAccessPolicy], *, source: str) -> tuple[Policy, ...]:
    """The policies that were saved, but for those that this version takes for wrong."""
    good = []
    for document in documents:
        try:
            good.append(api_types.check(document, source=source))
        except PolicyError as error:
            log.warning("policies of an earlier run cannot be read", error=str(error))
    return tuple(good)


def write(path: pathlib.Path, content: msgspec.Struct) -> None:
    """Replace it."""
    try:
        state_files.replace(path, msgspec.json.encode(content))
    except OSError as error:
        log.warning("policies cannot be saved", path=str(path), error=str(error))
