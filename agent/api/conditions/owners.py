"""The ConditionOwners of a node: from the API server, which every agent watches, or from files."""

import asyncio
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec
import structlog

from agent import backoff, labels, state_files, tasks
from agent.api.conditions import owner as owners
from agent.api.conditions.owner import ConditionOwner, OwnerError
from agent.kube import responses
from agent.kube.client import ApiClient
from agent.kube.objects import ObjectMetadata
from agent.kube.watcher import Query, Watcher
from agent.linux import directory_changes
from agent.logs import Event
from agent.pods import documents

log = structlog.get_logger(__name__)

# Changes are watched, so this is only for what nothing reports.
_PERIOD_SECONDS: Final = 30.0
# Registrations are few; each is a task of timers and a row of metrics.
_MAX_OWNERS: Final = 64


class OwnerSource(Protocol):
    """A source of ConditionOwners. `run` calls `on_change` after each change."""

    @property
    def owners(self) -> dict[str, ConditionOwner] | None:
        """By domain; None until they have been read."""

    @property
    def problems(self) -> list[str]:
        """One sentence for each that is not applied as written."""

    async def run(self) -> None: ...


class ApiOwner(msgspec.Struct, frozen=True, kw_only=True):
    """A ConditionOwner as received: an invalid spec does not interrupt the watch."""

    metadata: ObjectMetadata
    spec: msgspec.Raw = msgspec.Raw(b"null")

    def __post_init__(self) -> None:
        # Otherwise it is a view that keeps the whole list in memory.
        msgspec.structs.force_setattr(self, "spec", self.spec.copy())


class _SavedOwners(msgspec.Struct):
    version: str
    owners: list[ApiOwner]


QUERY: Final = Query(
    labels.OWNER_PLURAL,
    f"/apis/{labels.OWNER_API_VERSION}/{labels.OWNER_PLURAL}",
    ApiOwner,
    may_be_absent=True,
)


class _Documents:
    """Validated ones; of an invalid one the last valid version stays."""

    def __init__(self) -> None:
        self.owners: dict[str, ConditionOwner] = {}
        self.problems: list[str] = []

    def replace(self, found: Iterator[tuple[str, object]]) -> None:
        """found: documents, and where each is from."""
        before, self.owners, problems = self.owners, {}, []
        for where, document in found:
            name = _name_of(document)
            try:
                owner = owners.read(document)
                if owner.domain in self.owners:
                    raise OwnerError("there is one of this name already; remove one of the two")
                if len(self.owners) >= _MAX_OWNERS:
                    raise OwnerError(f"a node has at most {_MAX_OWNERS} of them; remove some")
                self.owners[owner.domain] = owner
            except OwnerError as error:
                kept = "; its last valid version stays" if name in before else ""
                if name in before:
                    self.owners.setdefault(name, before[name])
                problems.append(f"ConditionOwner {name!r} of {where}: {error}{kept}.")
        for problem in problems:
            if problem not in self.problems:
                log.warning(Event.CONDITION_OWNER_INVALID, error=problem)
        self.problems = problems


class ApiOwners:
    """Those of the API server."""

    def __init__(
        self,
        api: ApiClient,
        *,
        state: pathlib.Path,
        on_change: Callable[[], None],
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """state: the file with the last ones, for a start while the API server is away."""
        self.watcher = Watcher(api, QUERY, on_change=self._on_object, jitter=jitter)
        self._state = state
        self._on_change = on_change
        self._documents = _Documents()
        self._has_saved = False
        self._changed = asyncio.Event()

    @property
    def owners(self) -> dict[str, ConditionOwner] | None:
        has_list = self._has_saved or self.watcher.synced.is_set()
        return self._documents.owners if has_list else None

    @property
    def problems(self) -> list[str]:
        found = list(self._documents.problems)
        if self.watcher.problem:
            text = (
                f"ConditionOwners cannot be watched ({self.watcher.problem}); using the last ones."
            )
            found.append(text)
        elif self.watcher.is_absent:
            found.append("The API server has no resource conditionowners; install its definition.")
        return found

    async def run(self) -> None:
        """Follow them until cancelled."""
        if await asyncio.to_thread(self._restore):
            self._apply()
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "watch of conditionowners", self.watcher.run)
            await self.watcher.synced.wait()
            while True:
                self._changed.clear()
                self._apply()
                saved = _SavedOwners(self.watcher.version, list(self.watcher.objects.values()))
                await asyncio.to_thread(
                    state_files.write, self._state, saved, failure=Event.CONDITION_OWNERS_NOT_SAVED
                )
                await self._changed.wait()

    def _restore(self) -> bool:
        saved = state_files.read(
            self._state, _SavedOwners, failure=Event.CONDITION_OWNERS_UNREADABLE
        )
        if saved:
            self.watcher.seed(saved.owners, saved.version)
            self._has_saved = True
        return self._has_saved

    def _apply(self) -> None:
        objects = sorted(self.watcher.objects.values(), key=lambda one: one.metadata.name)
        self._documents.replace(("the API server", _document_of(one)) for one in objects)
        self._on_change()

    def _on_object(self, old: ApiOwner | None, new: ApiOwner | None) -> None:
        self._changed.set()


class FileOwners:
    """Those of a file, or of a directory of files."""

    def __init__(self, path: pathlib.Path, *, on_change: Callable[[], None]) -> None:
        self._path = path
        self._on_change = on_change
        self._documents = _Documents()
        self._is_read = False
        self._last: list[tuple[str, object]] = []
        self._unreadable: list[str] = []

    @property
    def owners(self) -> dict[str, ConditionOwner] | None:
        return self._documents.owners if self._is_read else None

    @property
    def problems(self) -> list[str]:
        return self._unreadable + self._documents.problems

    async def run(self) -> None:
        """Follow them until cancelled."""
        is_directory = await asyncio.to_thread(self._path.is_dir)
        directory = self._path if is_directory else self._path.parent
        only = None if is_directory else self._path.name
        async for _ in directory_changes.follow(directory, at_least_every_seconds=_PERIOD_SECONDS):
            try:
                found = await asyncio.to_thread(_read_all, directory, only)
            except (OSError, documents.DocumentError) as error:
                # Those that were read last stay.
                self._unreadable = [f"ConditionOwners cannot be read: {error}."]
                continue
            self._unreadable = []
            if not self._is_read or found != self._last:
                self._is_read, self._last = True, found
                self._documents.replace(iter(found))
                self._on_change()


def _read_all(directory: pathlib.Path, only: str | None) -> list[tuple[str, object]]:
    """Documents, and the file of each. Raises `OSError` or `DocumentError`."""
    found = []
    for name in sorted(documents.stamps(directory, only)):
        found += [(name, one) for one in documents.read_all(directory / name)]
    return found


def _name_of(document: object) -> str:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return str(name)[:253]


def _document_of(one: ApiOwner) -> dict[str, object]:
    try:
        spec = responses.decode(one.spec, object)
    except msgspec.DecodeError:
        spec = None
    return {
        "apiVersion": labels.OWNER_API_VERSION,
        "kind": labels.OWNER_KIND,
        "metadata": {"name": one.metadata.name},
        "spec": spec,
    }
