"""The Conditions API as a part of the agent: registrations, state, socket, metrics, findings."""

import asyncio
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import core

from agent import state_files, tasks
from agent.admin.report import ConditionOwnerStatus
from agent.api import listen
from agent.api.conditions import metrics, sockets
from agent.api.conditions.owned_conditions import OwnedConditions
from agent.api.conditions.owner import PodsField, domain_of
from agent.api.conditions.owners import ApiOwners, FileOwners, OwnerSource
from agent.api.conditions.records import SavedConditions
from agent.api.conditions.server import ConditionsServer
from agent.kube.client import ApiClient
from agent.kube.node_pods import NodePods
from agent.kube.objects import ApiPod
from agent.linux.procfs import boot_id
from agent.logs import Event
from agent.pods.changes import Changes, Subscription
from agent.pods.conditions import TRUE
from agent.pods.store import PodStore
from agent.state_files import StateSaver

# A crowd of pods reports together.
_SETTLE_SECONDS = 0.1


class ConditionsService:
    """Conditions that other owners report of this node's pods."""

    def __init__(
        self,
        run_directory: pathlib.Path,
        *,
        api: ApiClient | None,
        files: pathlib.Path | None,
        store: PodStore,
        pods: NodePods | None,
        sandbox_of: Callable[[str], str],
        sandbox_changes: Changes | None,
        unready_because: Callable[[], str | None],
        boot: str = "",
    ) -> None:
        """api: whose ConditionOwners count, unless `files` has them; pods: in a cluster, with their
        service accounts and readiness gates; sandbox_of: by uid, empty if unknown; sandbox_changes:
        of it, where the store's changes do not have them; boot: the kernel's boot id."""
        self._store = store
        self._pods = pods
        self._sandbox_changes = sandbox_changes
        state = run_directory / "state"
        self._state = state / "conditions.json"
        self.owned = OwnedConditions(
            store.conditions,
            pod_of=store.pod,
            sandbox_of=sandbox_of,
            has_all_pods=lambda: store.is_synced,
            boot=boot or boot_id(),
            on_change=lambda: self._saver.mark(),
        )
        self._saver = StateSaver(
            self._state,
            self.owned.content,
            failure=Event.OWNED_CONDITIONS_NOT_SAVED,
            settle_seconds=_SETTLE_SECONDS,
        )
        self._source: OwnerSource
        if files:
            self._source = FileOwners(files, on_change=self._on_owners)
        else:
            assert api is not None  # `podgate run` requires it
            owners_state = state / "conditionowners.json"
            self._source = ApiOwners(api, state=owners_state, on_change=self._on_owners)
        self._is_ready = asyncio.Event()
        self._server = ConditionsServer(
            self.owned,
            path=sockets.conditions(run_directory),
            inner=sockets.inner(run_directory),
            account_of=self._account_of,
            unready_because=unready_because,
            is_ready=self._is_ready,
        )

    async def run(self) -> None:
        """Follow and serve until cancelled."""
        saved = await asyncio.to_thread(
            state_files.read,
            self._state,
            SavedConditions,
            failure=Event.OWNED_CONDITIONS_UNREADABLE,
        )
        self.owned.restore(saved)
        failed = Event.CONDITIONS_API_NOT_SERVED
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "pods of owned conditions", self._follow)
            tasks.start(group, "condition owners", self._source.run)
            tasks.start(group, "state of owned conditions", self._saver.run)
            tasks.start(
                group, "conditions socket", lambda: listen.run_always(self._server.run, failed)
            )
            await self._store.synced.wait()
            self.owned.drop_unknown()
            self._is_ready.set()

    @property
    def problems(self) -> list[str]:
        """ConditionOwners that are not applied as written, one sentence each."""
        return self._source.problems

    def statuses(self) -> list[ConditionOwnerStatus]:
        """Of each owner, by domain."""
        waiting = self._waiting()
        found = []
        for domain, owner in sorted((self.owned.owners or {}).items()):
            total, stale = self.owned.numbers(domain)
            found.append(
                ConditionOwnerStatus(
                    domain=domain,
                    is_present=self.owned.is_present(domain),
                    gone_since=self.owned.gone_since(domain),
                    stale_after_seconds=owner.spec.stale_after_seconds,
                    when_stale=owner.spec.when_stale,
                    conditions=total,
                    stale=stale,
                    waiting_pods=sorted(waiting.get(domain, ())),
                )
            )
        return found

    def see_api(self, pod: ApiPod) -> None:
        """The API server has confirmed this version of a pod."""
        self.owned.see_api(pod)

    def collect(self) -> Iterator[core.Metric]:
        """As a collector of prometheus_client."""
        yield from metrics.collect(self.owned, self._server)

    async def _follow(self) -> None:
        changed = Subscription()
        kinds = (self._store.desired, self._sandbox_changes)
        followed = [kind for kind in kinds if kind is not None]
        for kind in followed:
            kind.subscribe(changed)
        try:
            while True:
                for uid in await changed.next():
                    self.owned.see_pod(uid)
        finally:
            for kind in followed:
                kind.unsubscribe(changed)

    def _on_owners(self) -> None:
        owners = self._source.owners
        if owners is not None and owners != self.owned.owners:
            self.owned.set_owners(owners)

    def _account_of(self, uid: str) -> PodsField | None:
        pod = self._pods.get(uid) if self._pods else None
        if pod is None or not pod.spec.service_account_name:
            return None
        return PodsField(
            namespace=pod.metadata.namespace, service_account=pod.spec.service_account_name
        )

    def _waiting(self) -> Mapping[str, Collection[str]]:
        """Pods with a readiness gate of an owner that is not True, by domain."""
        found: dict[str, set[str]] = {}
        for uid in self._pods.uids if self._pods else ():
            pod = self._pods.get(uid) if self._pods else None
            for kind in pod.gates if pod else ():
                condition = self._store.conditions.get(uid, kind)
                if pod and (condition is None or condition.status != TRUE):
                    found.setdefault(domain_of(kind), set()).add(pod.metadata.full_name)
        return found
