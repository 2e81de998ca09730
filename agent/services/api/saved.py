"""Saved Services and EndpointSlices, for a restart while the API server is unreachable."""

import datetime
import pathlib

import msgspec

from agent import state_files
from agent.logs import Event
from agent.services.api.local_readiness import ProbeReadiness
from agent.services.api.object_source import API_SERVER
from agent.services.api.objects import ApiService, EndpointSlice

_FORMAT = 1


class SavedServices(msgspec.Struct, kw_only=True):
    """The file's content. saved_at: when this was complete; versions: to continue the watches.

    instance_id, rev: the newest revision that had been published by then; 0 in files of agents that
    did not save it.
    """

    format: int = _FORMAT
    saved_at: datetime.datetime
    instance_id: int = 0
    rev: int = 0
    source: str = API_SERVER
    """The name of the source, which the versions are of."""
    zone: str
    """Of the node."""
    zones: dict[str, str] = {}
    """Of all nodes that the process serves."""
    services: list[ApiService]
    services_version: str
    slices: list[EndpointSlice]
    slices_version: str
    probed: dict[str, ProbeReadiness] = {}
    """By the runtime's uid of this node's pods."""


def read(path: pathlib.Path) -> SavedServices | None:
    """What the previous agent saved; None if there is no usable file. Blocks."""
    saved = state_files.read(path, SavedServices, failure=Event.SAVED_SERVICES_UNREADABLE)
    return saved if saved and saved.format == _FORMAT else None
