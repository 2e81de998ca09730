"""Saved API objects, so that a restarted agent gates pods while the API server is unreachable.

Environment values are not in the file: they are never decoded.
"""

import pathlib

import msgspec
import structlog

from agent.kube.objects import ApiPod, MetadataOnly
from agent.logs import Event

log = structlog.get_logger(__name__)

# 1,000 pods with the longest probe specs.
_MAX_BYTES = 64 << 20


class SavedObjects(msgspec.Struct):
    """The objects of one resource, and the version to continue the watch from."""

    version: str = ""
    objects: list[MetadataOnly] = []


class SavedPods(msgspec.Struct, kw_only=True):
    """The file's content."""

    node_name: str
    """A file of another node, on a cloned disk, is ignored."""
    pods: list[ApiPod] = []
    version: str = ""
    namespaces: SavedObjects = msgspec.field(default_factory=SavedObjects)
    nodes: SavedObjects = msgspec.field(default_factory=SavedObjects)


def read(path: pathlib.Path, node_name: str) -> SavedPods:
    """The saved state; empty if no usable file exists. Blocks."""
    nothing = SavedPods(node_name=node_name)
    try:
        with path.open("rb") as stream:
            saved = msgspec.json.decode(stream.read(_MAX_BYTES), type=SavedPods)
    except FileNotFoundError:
        return nothing
    except (OSError, msgspec.DecodeError) as error:
        log.warning(Event.SAVED_PODS_UNREADABLE, path=str(path), error=str(error))
        return nothing
    return saved if saved.node_name == node_name else nothing
