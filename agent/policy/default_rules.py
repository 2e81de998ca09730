"""Rules that each cluster needs, without a policy: API server to webhooks, DNS of the node, and
agents that are known to connect to pods.

They are policies as others, whose names no user's policy can have; `podgate rules` shows them. Each
group can be switched off (`--disable-default-rules`). Rules for an agent have no effect on a node
without a pod of it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator

from agent.linux.procfs import Procfs
from agent.pods.store import PodStore
from agent.policy import api_types, host_agents
from agent.policy.api_callees import ApiCallees, CalleeSnapshot
from agent.policy.api_server import STATIC_PODS, ApiServerProcess
from agent.policy.api_types import (
    CgroupField,
    FromField,
    HostAccessPolicy,
    Policy,
    PolicyMetadata,
    PortField,
    SpecField,
)
from agent.policy.effective import PolicyBatch
from agent.policy.kinds import PolicyError
from agent.policy.selectors import LabelSelector, PodSelector
from agent.settings import DEFAULT_RULE_GROUPS

API_SERVER = "api-server"
NODE_DNS = "podgate:node-dns/coredns"
"""The policy by which host processes may resolve names."""

# A process that serves the API server's port is searched for this often: some milliseconds.
_SEARCH_SECONDS = 5.0


class DefaultRules:
    """A `PolicyProvider`: of a node of a cluster."""

    problem = ""
    """A watch that fails is a problem of the API server's policies as well."""

    def __init__(
        self,
        callees: ApiCallees,
        *,
        store: PodStore,
        disabled: Collection[str],
        procfs: Procfs | None = None,
    ) -> None:
        """disabled: some of `DEFAULT_RULE_GROUPS`."""
        self.batch: PolicyBatch[Policy] = PolicyBatch(self.name)
        self._callees = callees
        self._store = store
        self._enabled = [group for group in DEFAULT_RULE_GROUPS if group not in disabled]
        self._api_server = ApiServerProcess(procfs or Procfs())
        self._of_table = tuple(
            _policy(f"{agent.group}/{agent.name}", agent.group, agent.spec)
            for agent in host_agents.TABLE
            if agent.group in self._enabled
        )
        self._next_search = 0.0
        self._process: str | None = None
        """The cgroup of an API server that is a host process."""
        self._used: tuple[object, ...] | None = None

    @property
    def name(self) -> str:
        return "podgate's default rules"

    @property
    def is_listed(self) -> bool:
        """Whether what the API server calls is known, if this node runs one."""
        return API_SERVER not in self._enabled or self._callees.is_listed

    def restore(self) -> None:
        if API_SERVER in self._enabled:
            self._callees.restore()

    def refresh(self) -> bool:
        snapshot = self._callees.snapshot
        sources = tuple(self._api_servers(snapshot)) if API_SERVER in self._enabled else ()
        if sources:
            self._callees.need()
        if self._used == (snapshot, sources):
            return False
        if API_SERVER in self._enabled and (self._used is None or self._used[0] != snapshot):
            self._callees.save(snapshot)
        self._used = snapshot, sources
        policies = list(self._of_table)
        problems = []
        if sources:
            for name, spec in _calls(snapshot, sources):
                try:
                    policies.append(_policy(name, API_SERVER, spec))
                except PolicyError as error:
                    problems.append(f"{self.name}, {name}: {error}.")
            problems += [
                f"Service {service} of a webhook or APIService has no selector; write a "
                "HostAccessPolicy for its pods."
                for service in snapshot.without_selector
            ]
        self.batch = PolicyBatch(self.name, tuple(policies), tuple(problems))
        return True

    async def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_least_every_seconds):
                    await self._callees.changed.wait()
            self._callees.changed.clear()
            yield

    def _api_servers(self, snapshot: CalleeSnapshot) -> Iterator[FromField]:
        """The API servers of this node. One that is gone may return to its cgroup."""
        now = time.monotonic()
        if now >= self._next_search:
            self._next_search = now + _SEARCH_SECONDS
            found = self._api_server.find_cgroup(snapshot.endpoints)
            self._process = found or self._process
        if self._process:
            yield FromField(cgroup=CgroupField(self._process))
        pods = [state.pod for state in list(self._store.states())]
        if any(
            pod.host_network and STATIC_PODS.matches(pod.namespace, pod.labels, {}) for pod in pods
        ):
            yield FromField(host_network_pods=STATIC_PODS)


def _calls(
    snapshot: CalleeSnapshot, sources: Iterable[FromField]
) -> Iterator[tuple[str, SpecField]]:
    for callee in snapshot.callees:
        pods = PodSelector((callee.namespace,), LabelSelector(dict(callee.selector)))
        yield (
            f"{API_SERVER}/{callee.namespace}/{callee.service}:{callee.port}",
            SpecField(pods=pods, from_=tuple(sources), ports=(PortField(port=callee.port),)),
        )


def _policy(name: str, group: str, spec: SpecField) -> Policy:
    """Raises `PolicyError`."""
    # The API server accepts no name with a colon.
    document = HostAccessPolicy(metadata=PolicyMetadata(f"podgate:{name}"), spec=spec)
    return api_types.compiled(document, source=f"default rules, group {group}")
