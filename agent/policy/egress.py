"""HostEgressPolicies of this node: follows policies, pods and cgroups, and writes the kernel's
tables. Without a policy no program is loaded.

What is in force stays so while policies cannot be read, and without the agent. It ends with the
policy, with `podgate off`, and after the dead man's time.
"""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from agent import tasks
from agent.kube.node_report import NodePolicies
from agent.kube.objects import ObjectMetadata
from agent.linux.cgroups import CgroupId, ancestors, cgroup2_mount
from agent.linux.pods_cgroup import PodsCgroup
from agent.linux.procfs import Procfs
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.object_labels import LabelSnapshot, ObjectLabels
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.policy import api_source, effective, egress_subjects
from agent.policy.api_source import WatchedPolicies
from agent.policy.cgroup_watches import CgroupWatches
from agent.policy.effective import PolicyBatch, PolicyProvider
from agent.policy.egress_types import HOST_EGRESS, EgressPolicy
from agent.policy.source_cgroups import SourceCgroups
from agent.settings import Settings
from bpf import errors, host_egress, pins
from bpf.host_egress import HostEgress
from bpf.host_egress_tables import EgressSource, EgressTable
from bpf.verdicts import Verdict

log = structlog.get_logger(__name__)

_PERIOD_SECONDS = 5.0
# Loading compiles for a second where the image has no programs for the kernel.
_RETRY_SECONDS = 60.0
_REFRESH_SECONDS = 60.0
# Between two refreshes, as a part of the time that one takes.
_REST_PER_REFRESH = 3
_MAX_REST_SECONDS = 5.0
# A new pod has its cgroup some seconds later, and a unit starts after the agent.
_SETTLE_SECONDS = 60.0
_NO_COOKIES = (
    "this kernel has no netns cookies (Linux 5.14), so packets are dropped and no call gets EPERM."
)


@dataclasses.dataclass(frozen=True, slots=True)
class EgressState:
    """What was read last. policies: those of this node; problems: of subjects, by policy."""

    policies: tuple[EgressPolicy, ...] = ()
    cgroups: egress_subjects.Cgroups = dataclasses.field(default_factory=dict)
    problems: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


class HostEgressPolicies:
    """The one writer of the kernel's tables. `open` before the first gate, then `run`."""

    def __init__(
        self,
        settings: Settings,
        installation: pins.Pins,
        *,
        api: WatchedPolicies[EgressPolicy] | None,
        store: PodStore,
        labels: ObjectLabels,
        modes: PodModes,
        has_netns: Callable[[], bool],
        pods_cgroup: PodsCgroup | None = None,
    ) -> None:
        """api: policies of a cluster, whose watch runs elsewhere; has_netns: whether hooks
        distinguish the host's sockets."""
        self._has_netns = has_netns
        self._path = settings.rules
        self._saved = settings.run_directory / "state" / "egresspolicies.json"
        self._own_namespace = settings.namespace
        self._installation = installation
        self._api = api
        self._store = store
        self._labels = labels
        self._modes = modes
        self.is_enabled = self._path is not None or api is not None
        self._sources: list[PolicyProvider[EgressPolicy]] = []
        self._batch: PolicyBatch[EgressPolicy] = PolicyBatch("")
        self._wake = asyncio.Event()
        for changes in (store.desired, labels.changes, modes.changes):
            changes.subscribe(Subscription(self._wake))
        self._root = cgroup2_mount()
        self._cgroups = SourceCgroups(self._root, pods_cgroup)
        self._watches = CgroupWatches(self._cgroups, self._wake)
        self._own = _own_cgroup(self._root)
        self.state = EgressState()
        self._kernel: HostEgress | None = None
        self._numbers: dict[str, int] = {}
        self._written: EgressTable | None = None
        self._problem = ""
        self._failed: tuple[object, float] | None = None
        """The policies that could not be put in force, and when."""
        self._missing_since: dict[tuple[str, str], float] = {}
        self._in_force: tuple[list[ObjectMetadata], dict[str, str]] | None = None
        """The API server's policies, and problems by name, as of the last refresh."""
        self._is_clean = False
        """Whether nothing is installed, as this agent has made sure."""

    async def open(self) -> None:
        """Restore saved policies. Takes over another version's programs, which stay in force until
        then (`GateWorker.remove_stale`)."""
        if not self.is_enabled:
            return
        if self._path:
            self._sources.append(await asyncio.to_thread(_files, self._path, self._saved))
        if self._api:
            self._sources.append(self._api)
        for source in self._sources:
            await asyncio.to_thread(source.restore)
        if await asyncio.to_thread(host_egress.is_installed, self._installation):
            await self._follow()

    async def run(self) -> None:
        """Follow policies, pods and cgroups until cancelled. Raises `TimeoutError` if the file
        system hangs."""
        if not self.is_enabled:
            await self._remove_leftovers()
            await asyncio.Event().wait()
        if self._api:
            await self._api.first_list()
        with self._watches.opened(), contextlib.ExitStack() as close:
            close.callback(self._close)
            async with asyncio.TaskGroup() as group:
                effective.follow(
                    group, self._sources, self._wake, at_least_every_seconds=_PERIOD_SECONDS
                )
                tasks.start(group, "cgroups of subjects", self._watches.run)
                group.create_task(self._wake_with_pods(), name="first pods")
                while True:
                    self._wake.clear()
                    seconds = await self._follow()
                    await tasks.tick(min(seconds * _REST_PER_REFRESH, _MAX_REST_SECONDS))
                    await self._wake.wait()

    async def _wake_with_pods(self) -> None:
        await self._store.synced.wait()
        self._wake.set()

    @property
    def problems(self) -> list[str]:
        """Why policies are not in force as written on this node, one sentence each."""
        if not self.state.policies:
            return [*self._batch.problems]
        found = [*self._batch.problems]
        if self._problem:
            found.append(f"HostEgressPolicies are not in force: {self._problem}")
        for policy in self.state.policies:
            found += [f"HostEgressPolicy {policy.name}: {text}" for text in self._lasting(policy)]
        return found

    def counts(self) -> dict[tuple[str, Verdict], int]:
        """Attempts by policy and verdict. Reads two maps."""
        return self._kernel.tables.counts() if self._kernel else {}

    def sources(self) -> list[EgressSource]:
        """Blocks for a moment."""
        return self._kernel.tables.sources() if self._kernel else []

    def node_policies(self) -> NodePolicies | None:
        """What the node reports of the API server's policies."""
        if self._in_force is None:
            return None
        policies, problems = self._in_force
        of_node = {
            policy.name: " ".join([self._problem, *self._lasting(policy)]).strip()
            for policy in self.state.policies
            if policy.source == api_source.SOURCE
        }
        failing = {name: text for name, text in of_node.items() if text}
        return NodePolicies.of(policies, failing | problems)

    def _lasting(self, policy: EgressPolicy) -> list[str]:
        """Problems that a start does not explain; of a cluster's policy, which is for all nodes, a
        missing unit is none."""
        now = time.monotonic()
        is_clusters = policy.source == api_source.SOURCE
        return [
            text
            for text in self.state.problems.get(policy.name, ())
            if not (is_clusters and text.startswith("This node has no"))
            and now - self._missing_since.get((policy.name, text), now) >= _SETTLE_SECONDS
        ]

    async def _follow(self) -> float:
        """Put the current policies in force. Returns the CPU seconds that reading them took."""
        labels = self._labels.snapshot()
        pods = [state.pod for state in self._store.states()]
        async with asyncio.timeout(_REFRESH_SECONDS):
            started = time.monotonic()
            self.state = await asyncio.to_thread(self._refresh, labels, pods)
            seconds = time.monotonic() - started
        self._note_missing()
        if self._api and self._api.has_list:
            self._in_force = self._api.newest(), self._api.invalid()
        # Until all policies and pods are known, what a previous agent has put in force stays.
        has_all = (self._api is None or self._api.has_list) and self._store.is_synced
        if has_all or not self._is_installed():
            await self._apply()
        return seconds

    def _is_installed(self) -> bool:
        return host_egress.is_installed(self._installation)

    def _refresh(self, labels: LabelSnapshot, pods: list[Pod]) -> EgressState:
        changed = [source.refresh() for source in self._sources]
        if any(changed) or not self._batch.name:
            batches = [source.batch for source in self._sources]
            self._batch = effective.join(batches, name="HostEgressPolicies")
            for problem in self._batch.problems:
                log.warning(Event.POLICY_PROBLEM, problem=problem)
        policies = egress_subjects.of_node(self._batch.policies, labels)
        if not policies:
            return EgressState()
        selected = egress_subjects.uids(policies, pods, labels, self._own_namespace)
        cgroups = self._cgroups.resolve(egress_subjects.sources_of(policies), selected)
        return EgressState(
            tuple(policies),
            cgroups,
            {one.name: egress_subjects.problems(one, cgroups, selected) for one in policies},
        )

    def _note_missing(self) -> None:
        now = time.monotonic()
        self._missing_since = {
            (name, text): self._missing_since.get((name, text), now)
            for name, texts in self.state.problems.items()
            for text in texts
        }

    async def _apply(self) -> None:
        policies = self.state.policies
        if not policies or self._modes.node.is_off:
            await self._remove_leftovers()
            return
        if self._failed:
            of_policies, at = self._failed
            if of_policies == self.state and time.monotonic() - at < _RETRY_SECONDS:
                return
        try:
            await self._put_in_force(policies)
        except (errors.KernelSideError, OSError) as error:
            self._failed = self.state, time.monotonic()
            self._set_problem(f"{str(error).rstrip('.')}.")

    async def _put_in_force(self, policies: Sequence[EgressPolicy]) -> None:
        if self._root is None:
            self._set_problem("cgroup v2 is not mounted.")
            return
        self._is_clean = False
        if self._kernel is None:
            directory = await host_egress.load(self._installation)
            self._kernel = await asyncio.to_thread(HostEgress, directory, self._installation)
        write = functools.partial(self._write, self._kernel, policies, self._root)
        self._set_problem(await asyncio.to_thread(write))
        self._failed = None

    def _write(
        self, kernel: HostEgress, policies: Sequence[EgressPolicy], root: pathlib.Path
    ) -> str:
        """Write what differs; returns why it has no effect, in one sentence, or "". Blocks."""
        names = {policy.name for policy in policies}
        if self._numbers.keys() != names:
            self._numbers = kernel.tables.numbers(names)
        table = egress_subjects.table(policies, self._numbers, self.state.cgroups, self._own)
        if table != self._written:
            kernel.tables.write(table)
            self._written = table
            log.info(
                Event.HOST_EGRESS_APPLIED,
                policies=len(policies),
                enforced=sum(policy.is_enforced for policy in policies),
                subjects=len(table.subjects),
                destinations=len(table.rules),
            )
        if not all(kernel.attached(root).values()):
            problems = [state for state in kernel.attach(root) if state.problem]
            if problems:
                return " ".join(f"{state.name}: {state.problem}." for state in problems)
        return "" if self._has_netns() else _NO_COOKIES

    async def _remove_leftovers(self) -> None:
        """Remove this version's programs, or another's; nothing where there are none."""
        if self._is_clean:
            return
        self._close()
        self._set_problem("")
        try:
            if await asyncio.to_thread(self._is_installed):
                await asyncio.to_thread(host_egress.remove, self._installation)
                log.info(Event.HOST_EGRESS_REMOVED)
            self._is_clean = True
        except (errors.KernelSideError, OSError) as error:
            self._set_problem(f"the programs cannot be removed: {error}.")

    def _close(self) -> None:
        if self._kernel:
            self._kernel.close()
        self._kernel, self._written, self._numbers = None, None, {}

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            log.error(Event.HOST_EGRESS_NOT_APPLIED, error=problem)
        self._problem = problem


def _files(path: pathlib.Path, state: pathlib.Path) -> PolicyProvider[EgressPolicy]:
    """Policies in files. Few agents have some, and importing YAML takes 30 ms."""
    from agent.policy.files import FilePolicies

    return FilePolicies(HOST_EGRESS, path, state=state)


def _own_cgroup(root: pathlib.Path | None) -> CgroupId | None:
    """Of this process."""
    path = Procfs().cgroup("self")
    found = ancestors(root, path) if root and path else []
    return CgroupId(found[-1], len(found) - 1) if found else None
