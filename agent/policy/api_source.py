"""Policies from the API server: all of them on each node, and nothing is written to any.

A policy that is wrong is wrong on every node alike, so a status or an Event of each node's would be
the same sentence a thousand times. The API server refuses nearly all of it in the first place
(definition.py).
"""

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import random
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from agent import backoff, labels
from agent.kube import responses
from agent.kube.client import ApiClient
from agent.kube.objects import ObjectMetadata
from agent.kube.watcher import Query, Watcher
from agent.policy import api_types, effective
from agent.policy import saved as saved_policies
from agent.policy.api_types import HostAccessPolicy, Policy, PolicyError
from agent.policy.effective import PolicyBatch

SOURCE: Final = "API server"

# Gates wait so long for policies that nobody has told of yet: the first answer takes some 50 ms.
_FIRST_SECONDS: Final = 2.0


class ApiPolicy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A HostAccessPolicy as it came. Whatever is in its spec, the watch goes on."""

    metadata: ObjectMetadata
    spec: msgspec.Raw = msgspec.Raw(b"null")

    def __post_init__(self) -> None:
        # Else a view into the whole list.
        msgspec.structs.force_setattr(self, "spec", self.spec.copy())


_Change = tuple[str, ApiPolicy | None]
"""A name, and what it stands for now."""

QUERY: Final = Query(
    labels.POLICY_PLURAL,
    f"/apis/{labels.POLICY_API_VERSION}/{labels.POLICY_PLURAL}",
    ApiPolicy,
    may_be_absent=True,
)


@dataclasses.dataclass(frozen=True, slots=True)
class _PolicyRecord:
    """One policy. good: what is in force of it; problem: why that is not the newest."""

    newest: ApiPolicy
    good: Policy | None
    problem: str = ""


class _SavedApiPolicies(msgspec.Struct):
    """What the API server said last. good: what is in force of those that are wrong."""

    version: str
    newest: list[ApiPolicy]
    good: list[HostAccessPolicy]


class ApiPolicies:
    """A `Source`. The watch runs on the event loop; looks at what it told may run in a thread."""

    def __init__(
        self, api: ApiClient, *, state: pathlib.Path, jitter: backoff.Jitter = random.random
    ) -> None:
        """state: a file of ours for what was in force last."""
        self.watcher = Watcher(api, QUERY, on_change=self._on_change, jitter=jitter)
        self._state = state
        # In the order in which they came: of too many, the first stay.
        self._records: dict[str, _PolicyRecord] = {}
        self._collected: list[_Change] = []
        # What the watch told at once, together: half a list would be other policies.
        self._changes: collections.deque[list[_Change]] = collections.deque()
        self._has_changes = asyncio.Event()
        self._has_saved = False
        self.batch = PolicyBatch(SOURCE)

    def restore(self) -> None:
        saved = saved_policies.read(self._state, _SavedApiPolicies)
        if saved is None:
            return
        self._has_saved = True
        good = {one.name: one for one in saved_policies.checked(saved.good, source=SOURCE)}
        for newest in saved.newest:
            name = newest.metadata.name
            self._records[name] = _read(newest, good.get(name))
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

    @property
    def problem(self) -> str:
        if not self.watcher.problem:
            return ""
        return f"{SOURCE}: {self.watcher.problem}; its policies stay as they were told last."

    @property
    def name(self) -> str:
        lacks = f" (which has no resource {labels.POLICY_PLURAL})" if self.watcher.is_absent else ""
        return f"the API server{lacks}"

    async def first_list(self) -> None:
        """Wait, a moment at most, until something is known of policies."""
        if self._has_saved:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_SECONDS):
                await self.watcher.answered.wait()

    async def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_least_every_seconds):
                    await self._has_changes.wait()
            self._has_changes.clear()
            yield

    def _on_change(self, old: ApiPolicy | None, new: ApiPolicy | None) -> None:
        known = new or old
        assert known is not None
        if not self._collected:
            asyncio.get_running_loop().call_soon(self._notify)
        self._collected.append((known.metadata.name, new))

    def _notify(self) -> None:
        self._changes.append(self._collected)
        self._collected = []
        self._has_changes.set()

    def _apply(self, name: str, newest: ApiPolicy | None) -> None:
        if newest is None:
            self._records.pop(name, None)
        else:
            before = self._records.get(name)
            self._records[name] = _read(newest, before.good if before else None)

    def _merge(self) -> None:
        found = self._records.values()
        problems = [one.problem for one in found if one.problem]
        self.batch = dataclasses.replace(
            self.batch,
            policies=tuple(one.good for one in found if one.good),
            problems=tuple(effective.abridged(problems, self.batch.name)),
        )


def _read(newest: ApiPolicy, before: Policy | None) -> _PolicyRecord:
    name = newest.metadata.name
    try:
        document = {
            "apiVersion": labels.POLICY_API_VERSION,
            "kind": labels.POLICY_KIND,
            "metadata": {"name": name},
            "spec": responses.decode(newest.spec, object),
        }
        return _PolicyRecord(newest, api_types.read(document, source=SOURCE))
    except (PolicyError, msgspec.DecodeError) as error:
        problem = f"{SOURCE}, policy {name!r}: {error}"
        return _PolicyRecord(
            newest, before, effective.sentence(problem, uses_last_good=before is not None)
        )
