"""Service maps: the services and endpoints that `src/services.c` translates.

Each key's value changes atomically; keys change one after the other, within microseconds.
"""

import collections
import contextlib
import hashlib
import itertools
import pathlib
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from bpf import errors, features, map_specs, maps, pinning, pins, rcu, sources, syscalls
from bpf.program_sets import ProgramSet, ProgramSpec
from bpf.services import links as service_links
from bpf.services.tables import (
    ENDPOINT_KEY,
    ENDPOINTS,
    MAPS,
    MAX_ENDPOINTS,
    MAX_SERVICES,
    MEMBERS,
    ONE,
    PEERS,
    SERVICES,
    SET,
    CService,
    ServiceAddress,
    ServiceEntry,
)

_T = TypeVar("_T")

# How many keys one call writes or deletes.
_BATCH = 4096


# Separate from the gates' programs: loaded only where the proxy is used.
PROGRAM_SET = ProgramSet(
    source="services.c",
    programs=tuple(ProgramSpec.hook(hook) for hook in service_links.HOOKS),
    maps=(*MAPS, PEERS),
    needs="Linux 5.10",
    features=(features.SET_RETVAL,),
)


class ServiceTableFullError(errors.KernelSideError):
    """More services or endpoints than the maps can hold; nothing was changed."""


class ServiceMaps:
    """The pinned maps. One writer. `change` may take seconds: not for an event loop."""

    def __init__(self, programs: pathlib.Path) -> None:
        """programs: the directory that `load` returned. Raises `PinError` or `BpfError`."""
        with contextlib.ExitStack() as undo:
            self._maps = {
                spec.name: undo.enter_context(maps.Map.open(str(programs / spec.name), spec))
                for spec in MAPS
            }
            undo.pop_all()
        self._loaded: dict[ServiceAddress, ServiceEntry] = {}
        # Entries of a previous proxy are overwritten or removed by the first change.
        self._inherited = {key for key, _ in self._map(SERVICES).items()}
        self._inherited_sets = {
            SET.unpack_from(key)[0] for key, _ in self._map(ENDPOINTS).items()
        } | {SET.unpack_from(value, 8)[0] for _, value in self._map(SERVICES).items()}
        self._numbers = itertools.count(max(self._inherited_sets, default=0) + 1)
        # Numbers of endpoint sets, and how many service addresses use each. A service's value
        # depends on its set alone, so two different values use two sets.
        self._sets: dict[tuple[int, ServiceEntry], int] = {}
        self._users: collections.Counter[tuple[int, ServiceEntry]] = collections.Counter()

    def __enter__(self) -> "ServiceMaps":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptors; the pinned programs continue to translate."""
        for opened in self._maps.values():
            opened.close()

    def change(
        self,
        changed: Mapping[ServiceAddress, ServiceEntry],
        removed: Collection[ServiceAddress] = (),
    ) -> None:
        """Set the services of these addresses, and remove the addresses in `removed`.

        The first call must pass all services: it removes the entries of a previous proxy. Raises
        `ServiceTableFullError` or `BpfError`; after a `BpfError` each address has its old or its
        new service, and the call may be repeated.
        """
        changed = {p: s for p, s in changed.items() if self._loaded.get(p) != s}
        removed = [place for place in removed if place in self._loaded]
        self._check_room(changed)
        added = {
            key: next(self._numbers)
            for key in {(place.protocol, service) for place, service in changed.items()}
            if key not in self._sets
        }
        self._write_sets(added)
        self._sets |= added
        self._write(
            SERVICES,
            ((p.pack(), self._pack(p.protocol, service)) for p, service in changed.items()),
        )
        for place in removed:
            self._map(SERVICES).delete(place.pack())
        unused = self._record(changed, removed)
        if unused or self._inherited_sets:
            self._remove_inherited_services()
            rcu.wait_for_programs()
            self._remove_sets(unused)
            self._remove_inherited_sets()

    def _map(self, spec: map_specs.MapSpec) -> maps.Map:
        return self._maps[spec.name]

    def _check_room(self, changed: Mapping[ServiceAddress, ServiceEntry]) -> None:
        sets = {(place.protocol, service) for place, service in changed.items()} - self._sets.keys()
        endpoints = sum(len(service.endpoints) for _, service in (*sets, *self._sets))
        for what, count, room in (
            ("services", len(changed.keys() | self._loaded.keys()), MAX_SERVICES),
            ("endpoints", endpoints, MAX_ENDPOINTS),
        ):
            if count > room:
                raise ServiceTableFullError(
                    f"there are {count} {what} to write and room for {room}; use the nft backend"
                )

    def _record(
        self, changed: Mapping[ServiceAddress, ServiceEntry], removed: Iterable[ServiceAddress]
    ) -> dict[tuple[int, ServiceEntry], int]:
        """Record the new state. Returns the sets that are no longer used."""
        before = [(place, self._loaded.pop(place, None)) for place in (*changed, *removed)]
        self._loaded |= changed
        self._users.update((place.protocol, service) for place, service in changed.items())
        unused = {}
        for place, service in before:
            if service is None:
                continue
            key = place.protocol, service
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                unused[key] = self._sets.pop(key)
        return unused

    def _pack(self, protocol: int, service: ServiceEntry) -> bytes:
        number = self._sets[protocol, service]
        return bytes(
            CService(service.id, number, len(service.endpoints), service.affinity_seconds, 0)
        )

    def _write_sets(self, added: Mapping[tuple[int, ServiceEntry], int]) -> None:
        packed = [
            (number, protocol, service, [endpoint.pack() for endpoint in service.endpoints])
            for (protocol, service), number in added.items()
        ]
        self._write(
            ENDPOINTS,
            (
                (ENDPOINT_KEY.pack(number, i), endpoint)
                for number, _, _, endpoints in packed
                for i, endpoint in enumerate(endpoints)
            ),
        )
        self._write(
            MEMBERS,
            (
                (SET.pack(number) + endpoint, ONE)
                for number, protocol, service, endpoints in packed
                if _has_members(protocol, service)
                for endpoint in endpoints
            ),
        )

    def _remove_sets(self, unused: Mapping[tuple[int, ServiceEntry], int]) -> None:
        self._delete(
            ENDPOINTS,
            (
                ENDPOINT_KEY.pack(number, i)
                for (_, service), number in unused.items()
                for i in range(len(service.endpoints))
            ),
        )
        self._delete(
            MEMBERS,
            (
                SET.pack(number) + endpoint.pack()
                for (protocol, service), number in unused.items()
                if _has_members(protocol, service)
                for endpoint in service.endpoints
            ),
        )

    def _remove_inherited_services(self) -> None:
        if self._inherited:
            current = {place.pack() for place in self._loaded}
            for key in self._inherited - current:
                self._map(SERVICES).delete(key)
            self._inherited = set()

    def _remove_inherited_sets(self) -> None:
        for spec in (ENDPOINTS, MEMBERS) if self._inherited_sets else ():
            keys = [key for key, _ in self._map(spec).items()]
            self._delete(spec, (k for k in keys if SET.unpack_from(k)[0] in self._inherited_sets))
        self._inherited_sets = set()

    def _write(self, spec: map_specs.MapSpec, entries: Iterable[tuple[bytes, bytes]]) -> None:
        for batch in _batches(entries):
            keys, values = zip(*batch, strict=True)
            syscalls.map_update_batch(self._map(spec).fd, keys, values)

    def _delete(self, spec: map_specs.MapSpec, keys: Iterable[bytes]) -> None:
        for batch in _batches(keys):
            syscalls.map_delete_batch(self._map(spec).fd, batch)


async def load(installation: pins.Pins) -> pathlib.Path:
    """Ensure that the current programs are pinned. Returns their directory.

    Loads only if the source has changed. Programs of other sources stay until `attach` has
    replaced them. Raises `PinError` or `CompileError`.
    """
    installation.prepare()
    parent = service_links.directory(installation)
    parent.mkdir(mode=0o700, exist_ok=True)
    text = sources.expand("services.c").encode()
    programs = parent / hashlib.sha256(text).hexdigest()[:16]
    await pinning.ensure_pinned(PROGRAM_SET, programs)
    return programs


def remove(installation: pins.Pins) -> None:
    """Stop translating and unpin everything. Needs no readable maps. Open connections stay."""
    service_links.detach(installation)
    if service_links.directory(installation).exists():
        shutil.rmtree(service_links.directory(installation))


def _has_members(protocol: int, service: ServiceEntry) -> bool:
    return bool(service.affinity_seconds) or protocol != socket.IPPROTO_TCP


def _batches(entries: Iterable[_T]) -> Iterator[list[_T]]:
    iterator = iter(entries)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch
