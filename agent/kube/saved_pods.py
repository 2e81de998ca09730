"""Saved API objects, so that a restarted agent gates pods while the API server is unreachable.

Environment values are not in the file: they are never decoded.
"""

import pathlib

import msgspec

from agent import state_files
from agent.kube.objects import ApiPod, MetadataOnly
from agent.logs import Event


class SavedObjects(msgspec.Struct):
    """The objects of one resource, and the version to continue the watch from."""

    version: str = ""
    objects: list[MetadataOnly] = []


class SavedPods(msgspec.Struct, kw_only=True):
    """The file's content."""

    node_name: str
    """A file of another node, on a cloned disk, is ignored."""
    pods: list[ApiPod] = []
    kubelet: list[ApiPod] = []
    """The same pods as the kubelet last reported them."""
    version: str = ""
    namespaces: SavedObjects = msgspec.field(default_factory=SavedObjects)
    nodes: SavedObjects = msgspec.field(default_factory=SavedObjects)


def read(path: pathlib.Path, node_name: str) -> SavedPods:
    """The saved state; empty if no usable file exists. Blocks."""
    saved = state_files.read(path, SavedPods, failure=Event.SAVED_PODS_UNREADABLE)
    return saved if saved and saved.node_name == node_name else SavedPods(node_name=node_name)
