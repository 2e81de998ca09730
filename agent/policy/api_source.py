"""Policies from the API server: every node watches all of them, and writes nothing to them.

An invalid policy is invalid on every node, so a status or Event of each node would repeat the same
sentence a thousand times. The API server rejects nearly all of them in the first place
(definition.py).
"""

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import random
from collections.abc import AsyncIterator
from typing import Any, Final, Generic

import msgspec

from agent import backoff, labels
from agent.kube import responses
from agent.kube.client import ApiClient
from agent.kube.objects import ObjectMetadata
from agent.kube.watcher import Query, Watcher
from agent.policy import effective
from agent.policy import saved as saved_policies
from agent.policy.api_types import HOST_ACCESS, Policy
from agent.policy.effective import PolicyBatch
from agent.policy.kinds import P, PolicyError, PolicyKind

SOURCE: Final = "API server"

# The first gates wait this long for policies that are not saved: the first list takes some 50 ms.
_FIRST_LIST_SECONDS: Final = 2.0


class ApiPolicy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A policy as received: an invalid spec does not interrupt the watch."""

    metadata: ObjectMetadata
    spec: msgspec.Raw = msgspec.Raw(b"null")

    def __post_init__(self) -> None:
        # Otherwise it is a view that keeps the whole list in memory.
        msgspec.structs.force_setattr(self, "spec", self.spec.copy())


_Change = tuple[str, ApiPolicy | None]
"""The name of a policy, and its newest version."""


def query(kind: PolicyKind[P]) -> Query[ApiPolicy]:
    """Of all policies of a kind."""
    path = f"/apis/{labels.POLICY_API_VERSION}/{kind.plural}"
    return Query(kind.plural, path, ApiPolicy, may_be_absent=True)


QUERY: Final = query(HOST_ACCESS)


@dataclasses.dataclass(frozen=True, slots=True)
class _PolicyRecord(Generic[P]):
    """One policy. good: the version in force; problem: why that is not the newest."""

    newest: ApiPolicy
    good: P | None
    problem: str = ""


class _SavedApiPolicies(msgspec.Struct):
    """The last state. good: the versions in force of invalid policies."""

    version: str
    newest: list[ApiPolicy]
    good: list[Any]


class WatchedPolicies(Generic[P]):
    """A `PolicyProvider`. The watch runs on the event loop, `refresh` in a thread."""

    def __init__(
        self,
        kind: PolicyKind[P],
        api: ApiClient,
        *,
        state: pathlib.Path,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """state: the file that stores the policies in force."""
        self._kind = kind
        self.watcher = Watcher(api, query(kind), on_change=self._on_change, jitter=jitter)
        self._state = state
        # In order of arrival: if there are too many, the first stay in force.
        self._records: dict[str, _PolicyRecord[P]] = {}
        self._collected: list[_Change] = []
        # Changes received together stay together: half a list would be other policies.
        self._changes: collections.deque[list[_Change]] = collections.deque()
        self._has_changes = asyncio.Event()
        self._has_saved = False
        self.batch: PolicyBatch[P] = PolicyBatch(SOURCE)

    def restore(self) -> None:
        saved = saved_policies.read(self._state, _SavedApiPolicies)
        if saved is None:
            return
        self._has_saved = True
        checked = saved_policies.checked(saved.good, self._kind, source=SOURCE)
        good = {policy.name: policy for policy in checked}
        for newest in saved.newest:
            name = newest.metadata.name
            self._records[name] = self._read(newest, good.get(name))
        self.watcher.seed(saved.newest, saved.version)
        self._merge()

    def refresh(self) -> bool:
        if not self._changes:
            return False
        while self._changes:
            for name, newest in self._changes.popleft():
                self._apply(name, newest)
        self._merge()
        kept = [one.good.document for one in self._records.values() if one.problem and one.good]
        newest_ones = [one.newest for one in self._records.values()]
        saved_policies.write(
            self._state, _SavedApiPolicies(self.watcher.version, newest_ones, kept)
        )
        return True

    def newest(self) -> list[ObjectMetadata]:
        """Metadata of all policies, as of the last refresh."""
        return [record.newest.metadata for record in self._records.values()]

    def invalid(self) -> dict[str, str]:
        """Why the newest version of a policy is not in force, by name, as of the last refresh."""
        return {name: one.problem for name, one in self._records.items() if one.problem}

    @property
    def problem(self) -> str:
        if not self.watcher.problem:
            return ""
        return f"{SOURCE}: {self.watcher.problem}; using its last known policies."

    @property
    def name(self) -> str:
        absence = f" (without resource {self._kind.plural})" if self.watcher.is_absent else ""
        return f"the API server{absence}"

    @property
    def has_list(self) -> bool:
        """Whether the policies were listed, now or in an earlier run."""
        return self._has_saved or self.watcher.synced.is_set() or self.watcher.is_absent

    async def first_list(self) -> None:
        """Wait briefly for the first list, unless policies were saved."""
        if self._has_saved:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LIST_SECONDS):
                await self.watcher.answered.wait()

    async def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_least_every_seconds):
                    await self._has_changes.wait()
            self._has_changes.clear()
            yield

    def _on_change(self, old: ApiPolicy | None, new: ApiPolicy | None) -> None:
        changed = new or old
        assert changed is not None
        if _is_same_spec(old, new):
            return
        if not self._collected:
            asyncio.get_running_loop().call_soon(self._notify)
        self._collected.append((changed.metadata.name, new))

    def _notify(self) -> None:
        self._changes.append(self._collected)
        self._collected = []
        self._has_changes.set()

    def _apply(self, name: str, newest: ApiPolicy | None) -> None:
        if newest is None:
            self._records.pop(name, None)
        else:
            before = self._records.get(name)
            self._records[name] = self._read(newest, before.good if before else None)

    def _merge(self) -> None:
        records = self._records.values()
        problems = [record.problem for record in records if record.problem]
        self.batch = dataclasses.replace(
            self.batch,
            policies=tuple(record.good for record in records if record.good),
            problems=tuple(effective.abridged(problems, self.batch.name)),
        )

    def _read(self, newest: ApiPolicy, before: P | None) -> _PolicyRecord[P]:
        name = newest.metadata.name
        try:
            policy = self._kind.read(document_of(newest, self._kind.name), SOURCE)
            generation = newest.metadata.generation
            return _PolicyRecord(newest, msgspec.structs.replace(policy, generation=generation))
        except (PolicyError, msgspec.DecodeError) as error:
            problem = f"{SOURCE}, policy {name!r}: {error}"
            return _PolicyRecord(
                newest, before, effective.sentence(problem, uses_last_good=before is not None)
            )


class ApiPolicies(WatchedPolicies[Policy]):
    """HostAccessPolicies of the API server."""

    def __init__(
        self, api: ApiClient, *, state: pathlib.Path, jitter: backoff.Jitter = random.random
    ) -> None:
        super().__init__(HOST_ACCESS, api, state=state, jitter=jitter)


def document_of(policy: ApiPolicy, kind: str = labels.POLICY_KIND) -> dict[str, object]:
    """The policy as a file would have it. Raises `msgspec.DecodeError`."""
    return {
        "apiVersion": labels.POLICY_API_VERSION,
        "kind": kind,
        "metadata": {"name": policy.metadata.name},
        "spec": responses.decode(policy.spec, object),
    }


def _is_same_spec(old: ApiPolicy | None, new: ApiPolicy | None) -> bool:
    """Whether only the status or metadata changed: of each policy, at each report of a node."""
    if old is None or new is None or not new.metadata.generation:
        return False
    before, after = old.metadata, new.metadata
    return (before.uid, before.generation) == (after.uid, after.generation)
