"""NetworkPolicies and ClusterNetworkPolicies of the API server: watched, and saved for outages.

A cluster without ClusterNetworkPolicies has none. Where the watch is interrupted, what was last
read counts.
"""

import asyncio
import pathlib
import random
from typing import Any, Final

import msgspec

from agent import backoff, state_files, tasks
from agent.kube.client import ApiClient
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.network_policy.objects import NetworkPolicy
from agent.network_policy.policy_set import PolicySet
from agent.policy.cluster_network_policies import api_types, evaluation
from agent.policy.cluster_network_policies.api_types import (
    KIND,
    ApiClusterNetworkPolicy,
    ClusterNetworkPolicy,
    NotUnderstoodError,
)
from agent.policy.cluster_network_policies.source import POLICIES as CLUSTER_POLICIES
from agent.state_files import StateSaver

POLICIES: Final = Query(
    "networkpolicies", "/apis/networking.k8s.io/v1/networkpolicies", NetworkPolicy
)

# A roll-out of policies is many changes; the file is for outages.
_SETTLE_SECONDS = 2.0


class _Saved(msgspec.Struct):
    """The file's content, with resource versions."""

    version: str
    policies: list[NetworkPolicy]
    cluster_version: str = ""
    cluster_policies: list[ApiClusterNetworkPolicy] = []


class NetworkPolicies:
    """All of the cluster. For the event loop."""

    def __init__(
        self, api: ApiClient, *, state: pathlib.Path, jitter: backoff.Jitter = random.random
    ) -> None:
        """state: the file to save to."""
        self.changed = asyncio.Event()
        """Set at each change; a reader clears it."""
        self._state = state
        self._watcher = Watcher(api, POLICIES, on_change=self._on_change, jitter=jitter)
        self._cluster_watcher = Watcher(
            api, CLUSTER_POLICIES, on_change=self._on_change, jitter=jitter
        )
        self._set: PolicySet | None = None
        self._not_understood: dict[str, str] = {}
        self._is_saved = False
        self._saver = StateSaver(
            state,
            self._content,
            failure=Event.POLICIES_NOT_SAVED,
            settle_seconds=_SETTLE_SECONDS,
        )

    @property
    def watchers(self) -> tuple[Watcher[Any], ...]:
        return self._watcher, self._cluster_watcher

    def restore(self) -> None:
        """Use what the previous agent saved. Reads a file; call it once, before `run`."""
        saved = state_files.read(self._state, _Saved, failure=Event.SAVED_POLICIES_UNREADABLE)
        if saved is None:
            return
        self._watcher.seed(saved.policies, saved.version)
        if saved.cluster_version:
            self._cluster_watcher.seed(saved.cluster_policies, saved.cluster_version)
        self._is_saved = True

    async def run(self) -> None:
        """Follow both resources until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in self.watchers:
                tasks.start(group, f"watch of {watcher.query.name} to try", watcher.run)
            tasks.start(group, "saved NetworkPolicies", self._saver.run)
            tasks.start(group, "first NetworkPolicies", self._await_first)

    async def _await_first(self) -> None:
        for watcher in self.watchers:
            await watcher.answered.wait()
        self.changed.set()
        # The right to read them may be granted later.
        await self._watcher.synced.wait()
        self._saver.mark()
        self.changed.set()
        await asyncio.Event().wait()

    @property
    def problem(self) -> str:
        """Why not all policies are known, in one sentence; else empty."""
        cluster = self._cluster_watcher
        if not (self._is_saved or self._watcher.synced.is_set()):
            return _unread(self._watcher)
        if not (self._is_saved or cluster.synced.is_set() or cluster.is_absent):
            return _unread(cluster)
        self._read()
        return next(iter(sorted(self._not_understood.values())), "")

    @property
    def policies(self) -> PolicySet:
        """Those that are understood."""
        return self._read()

    def _read(self) -> PolicySet:
        if self._set is None:
            self._not_understood.clear()
            found = [one for received in self._received if (one := self._understand(received))]
            network = tuple(self._watcher.objects.values())
            self._set = PolicySet(network, evaluation.ordered(found))
        return self._set

    @property
    def _received(self) -> list[ApiClusterNetworkPolicy]:
        return list(self._cluster_watcher.objects.values())

    def _understand(self, received: ApiClusterNetworkPolicy) -> ClusterNetworkPolicy | None:
        try:
            return api_types.read(received)
        except NotUnderstoodError as error:
            name = received.metadata.name
            text = str(error).rstrip(".")
            self._not_understood[name] = f"{KIND} {name} is not understood: {text}."
            return None

    def _on_change(self, old: object, new: object) -> None:
        self._set = None
        self.changed.set()
        self._saver.mark()

    def _content(self) -> _Saved:
        return _Saved(
            self._watcher.version,
            list(self._watcher.objects.values()),
            self._cluster_watcher.version,
            self._received,
        )


def _unread(watcher: Watcher[Any]) -> str:
    why = f": {watcher.problem.rstrip('.')}" if watcher.problem else ""
    return f"The API server has not listed {watcher.query.name} yet{why}."
