"""ClusterNetworkPolicies of the API server: watched, saved, and evaluated for the node's pods.

NetworkPolicies are watched, too, without their rules: a pod that one selects is not reached by the
Baseline tier. A cluster without the resource has no policies.
"""

import asyncio
import pathlib
import random
from collections.abc import Collection
from typing import Any, Final

import msgspec
import structlog

from agent import backoff, state_files, tasks
from agent.kube.client import ApiClient
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.pods.modes import Labels
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_modes import NODE, PodModes
from agent.policy.cluster_network_policies import api_types, evaluation
from agent.policy.cluster_network_policies.api_types import (
    KIND,
    ApiClusterNetworkPolicy,
    ApiNetworkPolicy,
    ClusterNetworkPolicy,
    NotUnderstoodError,
)
from agent.policy.cluster_network_policies.evaluation import Decision
from agent.policy.selectors import LabelSelector
from agent.state_files import StateSaver

log = structlog.get_logger(__name__)

POLICIES: Final = Query(
    "clusternetworkpolicies", api_types.PATH, ApiClusterNetworkPolicy, may_be_absent=True
)
NETWORK_POLICIES: Final = Query(
    "networkpolicies", "/apis/networking.k8s.io/v1/networkpolicies", ApiNetworkPolicy
)

# A roll-out of policies is many changes; the file is for outages.
_SETTLE_SECONDS = 2.0
# A problem is a sentence on a screen.
_MAX_PROBLEM = 300


class _Saved(msgspec.Struct):
    """The file's content, with resource versions."""

    version: str = ""
    policies: list[ApiClusterNetworkPolicy] = []
    network_version: str = ""
    network_policies: list[ApiNetworkPolicy] = []


class ClusterNetworkPolicies:
    """All of them. With `closes` it is the `Closures` of `PodModes`."""

    def __init__(
        self,
        api: ApiClient,
        *,
        state: pathlib.Path,
        labels: ObjectLabels,
        modes: PodModes,
        closes: bool,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """state: the file to save to; labels: of namespaces; modes: get a mark where a decision may
        have changed; closes: whether the host side of denied pods is closed."""
        self.closes = closes
        self._labels = labels
        self._modes = modes
        self._state = state
        self.watcher = Watcher(api, POLICIES, on_change=self._on_policy, jitter=jitter)
        self.network_watcher = Watcher(
            api, NETWORK_POLICIES, on_change=self._on_network_policy, jitter=jitter
        )
        self._policies: dict[str, ClusterNetworkPolicy] = {}
        self._ordered: tuple[ClusterNetworkPolicy, ...] = ()
        self._problems: dict[str, str] = {}
        self._network_policies: dict[str, dict[str, ApiNetworkPolicy]] = {}
        """By namespace and name; those for ingress."""
        self._is_settled = False
        self._has_network_policies = False
        self._saver = StateSaver(
            state,
            self._content,
            failure=Event.POLICIES_NOT_SAVED,
            settle_seconds=_SETTLE_SECONDS,
        )

    @property
    def watchers(self) -> tuple[Watcher[Any], ...]:
        return self.watcher, self.network_watcher

    def restore(self) -> None:
        """Use what the previous agent saved. Reads a file; call it once, before `run`."""
        saved = state_files.read(self._state, _Saved, failure=Event.SAVED_POLICIES_UNREADABLE)
        if saved is None or not saved.version:
            return
        self.watcher.seed(saved.policies, saved.version)
        for policy in saved.policies:
            self._set(policy.metadata.name, policy)
        if saved.network_version:
            self.network_watcher.seed(saved.network_policies, saved.network_version)
            for one in saved.network_policies:
                self._set_network_policy(None, one)
            self._has_network_policies = True
        self._is_settled = True

    async def run(self) -> None:
        """Follow both resources until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in self.watchers:
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)
            tasks.start(group, "saved ClusterNetworkPolicies", self._saver.run)
            tasks.start(group, "first ClusterNetworkPolicies", self._await_first)

    async def _await_first(self) -> None:
        """Until then gates keep the mode that they have."""
        await self.watcher.answered.wait()
        if not self.watcher.is_absent:
            await self.network_watcher.answered.wait()
        self._is_settled = True
        self._modes.changes.mark(NODE)
        # The right to read them may be granted later.
        await self.network_watcher.synced.wait()
        self._has_network_policies = True
        self._modes.changes.mark(NODE)
        self._saver.mark()
        await asyncio.Event().wait()

    @property
    def is_settled(self) -> bool:
        """Whether the policies were read, or cannot be for now."""
        return self._is_settled

    @property
    def policies(self) -> tuple[ClusterNetworkPolicy, ...]:
        """Those that are understood, in the order of evaluation."""
        return self._ordered

    @property
    def problems(self) -> list[str]:
        """Why some are not evaluated, one sentence each."""
        return [problem for _, problem in sorted(self._problems.items())]

    def closed_by(self, namespace: str, labels: Labels | None) -> str:
        """As `Closures`."""
        decision = self.decide(namespace, labels)
        return str(decision.by) if decision.is_denied else ""

    def namespaces(self) -> Collection[str]:
        """As `Closures`."""
        return self._labels.namespaces

    def decide(self, namespace: str, labels: Labels | None) -> Decision:
        """For a pod that is not on the host network; labels: None where they are unknown."""
        if not self._ordered:
            return Decision()
        return evaluation.evaluate(
            self._ordered,
            labels,
            self._labels.of_namespace(namespace),
            is_isolated=self._is_isolated(namespace, labels),
        )

    def _is_isolated(self, namespace: str, labels: Labels | None) -> bool | None:
        if not self._has_network_policies:
            return None
        selectors = [
            one.spec.pod_selector for one in self._network_policies.get(namespace, {}).values()
        ]
        if any(selector == LabelSelector() for selector in selectors):
            return True
        if labels is None:
            return None if selectors else False
        return any(selector.matches(labels) for selector in selectors)

    def _on_policy(
        self, old: ApiClusterNetworkPolicy | None, new: ApiClusterNetworkPolicy | None
    ) -> None:
        if old is not None and new is not None and old.spec == new.spec:
            return
        changed = new or old
        assert changed is not None
        name = changed.metadata.name
        before = self._policies.get(name)
        self._set(name, new)
        log.info(
            Event.CLUSTER_NETWORK_POLICY_CHANGED,
            policy=name,
            is_deleted=new is None,
            meaning=_meaning(self._policies.get(name), self._problems.get(name)),
            closes=self.closes,
        )
        if self._policies.get(name) != before:
            self._modes.changes.mark(NODE)
        self._saver.mark()

    def _set(self, name: str, received: ApiClusterNetworkPolicy | None) -> None:
        self._policies.pop(name, None)
        self._problems.pop(name, None)
        if received is not None:
            try:
                self._policies[name] = api_types.read(received)
            except NotUnderstoodError as error:
                text = f"{KIND} {name} is not understood, and not evaluated: {error}"
                self._problems[name] = text[:_MAX_PROBLEM].rstrip(".") + "."
        self._ordered = evaluation.ordered(self._policies.values())

    def _on_network_policy(
        self, old: ApiNetworkPolicy | None, new: ApiNetworkPolicy | None
    ) -> None:
        if old is not None and new is not None and old.spec == new.spec:
            return
        self._set_network_policy(old, new)
        changed = new or old
        assert changed is not None
        if self._ordered:
            self._modes.changes.mark(changed.metadata.namespace)
        self._saver.mark()

    def _set_network_policy(
        self, old: ApiNetworkPolicy | None, new: ApiNetworkPolicy | None
    ) -> None:
        if old is not None:
            of_namespace = self._network_policies.get(old.metadata.namespace, {})
            of_namespace.pop(old.metadata.name, None)
            if not of_namespace:
                self._network_policies.pop(old.metadata.namespace, None)
        if new is not None and new.spec.has_ingress:
            of_namespace = self._network_policies.setdefault(new.metadata.namespace, {})
            of_namespace[new.metadata.name] = new

    def _content(self) -> _Saved:
        has_list = self._has_network_policies
        return _Saved(
            self.watcher.version,
            list(self.watcher.objects.values()),
            self.network_watcher.version if has_list else "",
            list(self.network_watcher.objects.values()) if has_list else [],
        )


def _meaning(policy: ClusterNetworkPolicy | None, problem: str | None) -> str:
    return evaluation.meaning(policy) if policy else problem or ""
