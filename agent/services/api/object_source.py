"""Sources of Services and EndpointSlices: the API server, files, or another podgate."""

import asyncio
import dataclasses
import datetime
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from agent.services.api.objects import ApiService, EndpointSlice
from agent.services.api.stretches import Stretches

API_SERVER = "the API server"
"""Name of that source."""

Key = tuple[str, str]
"""Namespace and name."""
Services = Mapping[Key, ApiService]
Slices = Mapping[Key, EndpointSlice]

ObjectT = TypeVar("ObjectT", ApiService, EndpointSlice)
OnService = Callable[[ApiService | None, ApiService | None], None]
OnSlice = Callable[[EndpointSlice | None, EndpointSlice | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class SourcePosition:
    """Where the API server's watches continue after a restart; empty for other sources."""

    services_version: str = ""
    slices_version: str = ""


class ObjectSource(Protocol):
    """Where the objects come from. It reports each change once, by the functions that it was
    created with, and nothing that it was seeded with."""

    @property
    def name(self) -> str:
        """For people, and to compare it with the source of saved objects."""

    @property
    def services(self) -> Services: ...
    @property
    def slices(self) -> Slices: ...
    @property
    def synced(self) -> asyncio.Event:
        """Set once the source has sent everything in this run, so that the objects are whole."""

    @property
    def saved_at(self) -> datetime.datetime | None:
        """When the source itself saved what it sends; None if that is current."""

    def as_of(self) -> datetime.datetime:
        """When the objects were last known to be current."""

    @property
    def problems(self) -> Mapping[str, str]:
        """One sentence for each part that is not available now, by the part's name."""

    def position(self) -> SourcePosition: ...

    def seed(
        self, services: list[ApiService], slices: list[EndpointSlice], position: SourcePosition
    ) -> None:
        """Start with these objects, which are not reported. Call it before `run`."""

    async def run(self) -> None:
        """Follow it until cancelled."""


class ObjectMirror:
    """The objects of a source that sends whole states; finds and reports the differences."""

    def __init__(self, on_service: OnService, on_slice: OnSlice) -> None:
        self.services: dict[Key, ApiService] = {}
        self.slices: dict[Key, EndpointSlice] = {}
        self._on_service = on_service
        self._on_slice = on_slice

    def seed(self, services: list[ApiService], slices: list[EndpointSlice]) -> None:
        """Start with these, which are not reported."""
        self.services = {key_of(one): one for one in services}
        self.slices = {key_of(one): one for one in slices}

    def put(self, service: ApiService) -> None:
        """Add or replace a service."""
        _put(self.services, service, self._on_service)

    def put_slice(self, found: EndpointSlice) -> None:
        """Add or replace a slice."""
        _put(self.slices, found, self._on_slice)

    def remove(self, key: Key) -> None:
        """Remove a service."""
        if old := self.services.pop(key, None):
            self._on_service(old, None)

    def remove_slice(self, key: Key) -> None:
        """Remove a slice."""
        if old := self.slices.pop(key, None):
            self._on_slice(old, None)

    async def replace(self, services: Services, slices: Slices) -> None:
        """Have exactly these objects. Other tasks run meanwhile."""
        stretches = Stretches()
        for key in [key for key in self.slices if key not in slices]:
            self.remove_slice(key)
            await stretches.step()
        for found in slices.values():
            self.put_slice(found)
            await stretches.step()
        for key in [key for key in self.services if key not in services]:
            self.remove(key)
            await stretches.step()
        for service in services.values():
            self.put(service)
            await stretches.step()


def key_of(found: ApiService | EndpointSlice) -> Key:
    return found.metadata.namespace, found.metadata.name


def _put(
    objects: dict[Key, ObjectT],
    new: ObjectT,
    on_change: Callable[[ObjectT | None, ObjectT | None], None],
) -> None:
    key = key_of(new)
    old = objects.get(key)
    if old != new:
        objects[key] = new
        on_change(old, new)
