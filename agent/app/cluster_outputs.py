"""Writes a node's results to the API server: conditions, Events, and endpoints of services."""

import asyncio
import datetime
from typing import TYPE_CHECKING

import msgspec
import structlog

from agent import labels, tasks
from agent.admin.report import PodSourceStatus, SourceProblem
from agent.cri.models import CriContainerState
from agent.gates.metrics import GateMetrics
from agent.kube import patches
from agent.kube.client import ApiClient
from agent.kube.condition_writer import ConditionWriter
from agent.kube.events import EventRecorder
from agent.kube.objects import MetadataOnly, PodCondition
from agent.kube.patches import SandboxStamp
from agent.kube.watcher import Watcher
from agent.linux.procfs import boot_id
from agent.logs import Event
from agent.pods.conditions import Condition
from agent.pods.events import PodEvents
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.settings import Settings
from agent.sources.cluster import ClusterSource

if TYPE_CHECKING:
    # Imported only where they are configured.
    from agent.api.conditions.service import ConditionsService
    from agent.services.api.source import ServiceEndpoints

log = structlog.get_logger(__name__)

_CONDITIONS = "conditions"


class ClusterOutputs:
    """Follows store, source and events, and writes to the API server."""

    def __init__(
        self,
        api: ApiClient,
        settings: Settings,
        store: PodStore,
        source: ClusterSource,
        events: PodEvents,
        metrics: GateMetrics,
        others: "ConditionsService | None" = None,
    ) -> None:
        """others: conditions of other owners; None: those that are in the API are no one's."""
        assert settings.node_name is not None
        self._store = store
        self._source = source
        self._events = events
        self._metrics = metrics
        self._others = others
        self._objects = source.changes.subscribe()
        for uid in source.pods.uids:
            self._objects.mark(uid)
        self._conditions = store.conditions.changes.subscribe()
        self._in_force = store.in_force.subscribe()
        self._first_gates: dict[str, datetime.datetime] = {}
        self._boot = boot_id()
        self.writer = ConditionWriter(
            api,
            conditions_of=self._conditions_of,
            sandbox_of=self._sandbox_name,
            boot=self._boot,
            writes_all=settings.write_all_conditions,
            is_withdrawn=others.owned.is_withdrawn if others else lambda uid, kind: True,
        )
        self.recorder = EventRecorder(api, node_name=settings.node_name)
        self.endpoints: ServiceEndpoints | None = None
        self._all_nodes: Watcher[MetadataOnly] | None = None
        if chosen := settings.service_endpoints:
            from agent.app import service_outputs

            self.endpoints, self._all_nodes = service_outputs.of_cluster(
                settings, chosen, api, source
            )

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "conditions to the API", self.writer.run)
            tasks.start(group, "events to the API", self.recorder.run)
            tasks.start(group, "objects of pods", self._follow_objects)
            tasks.start(group, "conditions of pods", self._follow_conditions)
            tasks.start(group, "events of pods", self._follow_events)
            tasks.start(group, "first gates", self._follow_gates)
            if self.endpoints:
                tasks.start(group, "service endpoints", self.endpoints.run)
            if self._all_nodes:
                tasks.start(group, "watch of all nodes", self._all_nodes.run)
            await self._source.sandboxes.listed.wait()
            self.writer.enqueue_all()

    @property
    def api_problems(self) -> dict[str, str]:
        """Why a resource of the API server cannot be watched or written now, by its name."""
        problems = self._source.watch_problems
        if self.writer.problem:
            problems[_CONDITIONS] = self.writer.problem
        if self.endpoints and self.endpoints.is_from_api:
            problems |= self.endpoints.source.problems
        return problems

    def status(self) -> PodSourceStatus:
        """The source's status, with pending conditions and problems of the API server."""
        found = self._source.status()
        services = self.endpoints.problems() if self.endpoints else []
        api = [
            SourceProblem(
                part="conditions" if what == _CONDITIONS else "watch",
                text=f"API server, {what}: {problem}",
            )
            for what, problem in self.api_problems.items()
        ]
        return PodSourceStatus(
            pods_from=found.pods_from,
            problems=api + services + found.problems,
            pending_conditions=self.writer.pending,
            pending_seconds=self.writer.oldest_pending_seconds,
        )

    def policy_ready(self, uid: str) -> PodCondition | None:
        """The API server's condition of a pod, without its stamp, if it is True of its current
        sandbox."""
        pod = self._source.pods.reports(uid).of_api
        kind = labels.POLICY_READY
        stamp = SandboxStamp(self._sandbox_name(uid), self._boot)
        if pod is None or patches.true_since(pod, kind, stamp) is None:
            return None
        condition = pod.condition(kind)
        assert condition is not None  # `true_since`
        return msgspec.structs.replace(condition, message=patches.without_stamp(condition))

    def passing_since(self, uid: str) -> float | None:
        """Since when, as Unix time, the API server has the probes of a pod's current sandbox as
        passing; None if it does not."""
        pod = self._source.pods.reports(uid).of_api
        stamp = SandboxStamp(self._sandbox_name(uid), self._boot)
        return patches.true_since(pod, labels.PROBES_PASSING, stamp) if pod else None

    async def _follow_objects(self) -> None:
        while True:
            for uid in await self._objects.next():
                self._set_object(uid)

    def _set_object(self, uid: str) -> None:
        if self._source.has_ended(uid):
            self.writer.forget(uid)
            if self.endpoints:
                self.endpoints.end_pod(uid)
            return
        reports = self._source.pods.reports(uid)
        if reports.of_api:
            if self._others and reports.is_confirmed:
                self._others.see_api(reports.of_api)
            self.writer.set_pod(reports.of_api)
        if self.endpoints:
            self.endpoints.set_pod(uid, reports)
        # Its sandbox may have changed, and conditions contain its name.
        self.writer.enqueue(uid)

    async def _follow_conditions(self) -> None:
        while True:
            for uid in await self._conditions.next():
                self.writer.enqueue(uid)
                if self.endpoints:
                    condition = self._store.conditions.get(uid, labels.PROBES_PASSING)
                    self.endpoints.condition_changed(uid, condition)

    async def _follow_events(self) -> None:
        while True:
            for event in await self._events.next():
                if event.namespace:
                    self.recorder.record_namespace(
                        event.namespace, event.reason, event.message, action=event.action
                    )
                elif event.uid is None:
                    self.recorder.record_node(event.reason, event.message, action=event.action)
                elif api_pod := self._source.pods.get(event.uid):
                    self.recorder.record(
                        api_pod,
                        event.reason,
                        event.message,
                        action=event.action,
                        container=event.container,
                        about=event.about,
                        is_warning=event.is_warning,
                    )

    async def _follow_gates(self) -> None:
        while True:
            for uid in await self._in_force.next():
                state = self._store.get(uid)
                if state is None:
                    self._first_gates.pop(uid, None)
                elif state.first_gated_at and state.first_gated_at != self._first_gates.get(uid):
                    self._first_gates[uid] = state.first_gated_at
                    self._measure_first_gate(state, state.first_gated_at)

    def _measure_first_gate(self, state: PodState, gated_at: datetime.datetime) -> None:
        sandbox = self._source.sandboxes.current.get(state.pod.uid)
        if sandbox is None or sandbox.created is None:
            return
        seconds = max(0.0, (gated_at - sandbox.created).total_seconds())
        self._metrics.ungated_seconds.observe(seconds)
        started = [
            container.name
            for container in self._source.sandboxes.containers.get(state.pod.uid, ())
            if container.state is not CriContainerState.CREATED
        ]
        record = log.warning if started else log.info
        record(
            Event.CONTAINERS_STARTED_BEFORE_GATE if started else Event.FIRST_GATE,
            pod=state.pod.full_name,
            sandbox=sandbox.id,
            ungated_seconds=round(seconds, 3),
            containers=started,
        )

    def _conditions_of(self, uid: str) -> list[Condition]:
        """The conditions that the API should have of a pod.

        None until the runtime has listed its sandboxes, since a missing one proves nothing before;
        and none of a pod that is being deleted and has no sandbox, where that is expected.
        """
        is_deleting = self._source.pods.reports(uid).deletion_timestamp is not None
        has_ended = is_deleting and uid not in self._source.sandboxes.current
        if has_ended or not self._source.sandboxes.listed.is_set():
            return []
        return self._store.conditions.of(uid)

    def _sandbox_name(self, uid: str) -> str:
        sandbox = self._source.sandboxes.current.get(uid)
        return sandbox.short_id if sandbox else ""
