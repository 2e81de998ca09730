"""The component that writes the status of policies, from the nodes' reports."""

import asyncio
import contextlib
import dataclasses
import datetime
import random
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from agent import backoff, tasks
from agent.controller import policy_status
from agent.controller.policy_revisions import PolicyRevisions
from agent.controller.policy_status import PolicyStatus, ValidatedPolicy
from agent.kube import node_report
from agent.kube.client import MERGE, ApiClient, ApiError
from agent.kube.node_report import NodePolicies, NodeReport, NodeStatus
from agent.kube.objects import MetadataOnly
from agent.kube.watcher import Query, Watcher
from agent.logs import Event
from agent.policy import api_source, api_types, egress_types
from agent.policy.api_source import ApiPolicy
from agent.policy.kinds import P, PolicyKind

log = structlog.get_logger(__name__)

# Nodes report within 20 s of each other. Each status that is written is an event for every node.
_PASS_SECONDS: Final = 5.0
_WRITES_PER_SECOND, _BURST = 20.0, 50
# All nodes have written since they last changed something; until then, what a previous leader
# found is not lowered.
_SETTLE_SECONDS: Final = 120.0


class PolicyWithStatus(ApiPolicy, frozen=True, kw_only=True, gc=False):
    """A policy with what this component wrote."""

    status: msgspec.Raw = msgspec.Raw(b"null")

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "status", self.status.copy())


@dataclasses.dataclass(frozen=True, slots=True)
class ReportedKind:
    """A kind of policies. validated: reads one; reported: what a node has of them in force."""

    query: Query[PolicyWithStatus]
    validated: Callable[[ApiPolicy], ValidatedPolicy]
    reported: Callable[[NodeStatus], NodePolicies | None]


def _query(kind: PolicyKind[P]) -> Query[PolicyWithStatus]:
    query = api_source.query(kind)
    return Query(query.name, query.path, PolicyWithStatus, may_be_absent=True)


HOST_ACCESS: Final = ReportedKind(
    _query(api_types.HOST_ACCESS), policy_status.validated, lambda status: status.policies
)
HOST_EGRESS: Final = ReportedKind(
    _query(egress_types.HOST_EGRESS),
    policy_status.validated_egress,
    lambda status: status.egress_policies,
)
POLICIES: Final = HOST_ACCESS.query
NODES: Final = Query("nodes", "/api/v1/nodes", MetadataOnly, is_metadata_only=True)
NAMESPACES: Final = Query("namespaces", "/api/v1/namespaces", MetadataOnly, is_metadata_only=True)
REPORTS: Final = Query("nodereports", node_report.PATH, NodeReport, may_be_absent=True)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class PolicyStatusWriter:
    """Follows policies, nodes and reports, and writes each status that differs."""

    def __init__(
        self,
        api: ApiClient,
        *,
        kind: ReportedKind = HOST_ACCESS,
        now: Callable[[], datetime.datetime] = _utc_now,
        jitter: backoff.Jitter = random.random,
    ) -> None:
        self._api = api
        self._kind = kind
        self._now = now
        self._changed = asyncio.Event()
        self._revisions = PolicyRevisions()
        self._validated: dict[tuple[str, int], ValidatedPolicy] = {}
        self._bucket = backoff.Bucket(per_second=_WRITES_PER_SECOND, burst=_BURST)
        self._policies = Watcher(api, kind.query, on_change=self._on_policy, jitter=jitter)
        self._nodes = Watcher(api, NODES, on_change=self._on_node, jitter=jitter)
        self._reports = Watcher(api, REPORTS, on_change=self._on_change, jitter=jitter)
        self._namespaces = Watcher(api, NAMESPACES, on_change=self._on_namespace, jitter=jitter)
        self._problem = ""

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in (self._policies, self._nodes, self._reports, self._namespaces):
                tasks.start(group, f"watch of {watcher.query.name}", watcher.run)
            await self._policies.answered.wait()
            await self._nodes.synced.wait()
            await self._reports.answered.wait()
            settled_at = asyncio.get_running_loop().time() + _SETTLE_SECONDS
            while True:
                self._changed.clear()
                is_settled = asyncio.get_running_loop().time() >= settled_at
                await self._write_all(is_settled=is_settled)
                await asyncio.sleep(_PASS_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SETTLE_SECONDS):
                        await self._changed.wait()

    def _on_policy(self, old: PolicyWithStatus | None, new: PolicyWithStatus | None) -> None:
        if self._policies.synced.is_set():
            self._revisions.update(one.metadata for one in self._policies.objects.values())
        self._changed.set()

    def _on_node(self, old: MetadataOnly | None, new: MetadataOnly | None) -> None:
        """The kubelet writes every node each five minutes."""
        if old is None or new is None or old.metadata.labels != new.metadata.labels:
            self._changed.set()

    def _on_namespace(self, old: MetadataOnly | None, new: MetadataOnly | None) -> None:
        if old is None or new is None:
            self._changed.set()

    def _on_change(self, old: NodeReport | None, new: NodeReport | None) -> None:
        self._changed.set()

    async def _write_all(self, *, is_settled: bool) -> None:
        policies = list(self._policies.objects.values())
        self._revisions.update(one.metadata for one in policies)
        nodes = {name: one.metadata.labels for (_, name), one in self._nodes.objects.items()}
        reports = {
            name: reported
            for (_, name), report in self._reports.objects.items()
            if (reported := self._kind.reported(report.status))
        }
        # Without the right to watch them none counts as missing.
        namespaces = {name for _, name in self._namespaces.objects}
        is_complete = self._namespaces.synced.is_set()
        now = self._now()
        validated = {}
        for policy in policies:
            key = policy.metadata.uid, policy.metadata.generation
            found = self._validated.get(key) or self._kind.validated(policy)
            validated[key] = found
            before = policy_status.read_status(policy.status)
            missing = sorted(found.namespaces - namespaces) if is_complete else ()
            status = policy_status.evaluate(
                policy,
                found,
                missing,
                policy_status.selected(nodes, found.nodes),
                reports,
                self._revisions,
                now=now,
                before=before,
            )
            if status != before and (is_settled or not _is_lower(status, before)):
                await self._bucket.wait()
                await self._write(policy, status)
            # For 5,000 nodes that was some milliseconds.
            await asyncio.sleep(0)
        self._validated = validated

    async def _write(self, policy: PolicyWithStatus, status: PolicyStatus) -> None:
        metadata = policy.metadata
        try:
            await self._api.request(
                "PATCH",
                f"{self._kind.query.path}/{metadata.name}/status",
                # A policy that was written since is evaluated again.
                body={
                    "metadata": {"resourceVersion": metadata.resource_version},
                    "status": msgspec.to_builtins(status),
                },
                content_type=MERGE,
            )
        except ApiError as error:
            if error.code not in (404, 409):
                if not self._problem:
                    log.warning(Event.POLICY_STATUS_NOT_WRITTEN, error=str(error), code=error.code)
                self._problem = str(error)
                self._changed.set()
            return
        self._problem = ""


def _is_lower(status: PolicyStatus, before: PolicyStatus | None) -> bool:
    """Whether fewer nodes have the same generation than were seen before."""
    return (
        before is not None
        and before.observed_generation == status.observed_generation
        and status.nodes.programmed < before.nodes.programmed
    )
