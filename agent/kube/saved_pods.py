"""What is known of the API's objects, kept in a file, so that a restarted agent goes on at once
while the API server is away. Environment values are not in it: they are never decoded."""

import pathlib

import msgspec
import structlog

from agent.kube.objects import ApiPod, MetadataOnly
from agent.state_files import StateFile

log = structlog.get_logger(__name__)

# 1,000 pods with the longest probe specs.
_MAX_BYTES = 64 << 20


class SavedObjects(msgspec.Struct):
    """One resource as it was last seen: objects, and the version to go on from."""

    version: str = ""
    objects: list[MetadataOnly] = []


class SavedPods(msgspec.Struct, kw_only=True):
    """The file's content."""

    node_name: str
    """Another node's file, on a disk that was cloned, is nobody's."""
    pods: list[ApiPod] = []
    version: str = ""
    namespaces: SavedObjects = msgspec.field(default_factory=SavedObjects)
    nodes: SavedObjects = msgspec.field(default_factory=SavedObjects)


class SavedPodsFile:
    """Reads and replaces the file; for root only. Both block: not for the event loop."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file = StateFile(path)

    def read(self, node_name: str) -> SavedPods:
        """The saved state; empty where there is none that can be used."""
        nothing = SavedPods(node_name=node_name)
        try:
            with self._path.open("rb") as stream:
                saved = msgspec.json.decode(stream.read(_MAX_BYTES), type=SavedPods)
        except FileNotFoundError:
            return nothing
        except (OSError, msgspec.DecodeError) as error:
            log.warning(
                "saved pods cannot be read; the API server has to be asked first",
                path=str(self._path),
                error=str(error),
            )
            return nothing
        return saved if saved.node_name == node_name else nothing

    def write(self, number: int, saved: SavedPods) -> None:
        """Replace the file. number: grows; an older one never undoes a newer."""
        try:
            self._file.write(number, msgspec.json.encode(saved))
        except OSError as error:
            log.warning("pods cannot be saved", path=str(self._path), error=str(error))
