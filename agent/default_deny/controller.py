"""Maintains the default-deny table, which blocks host traffic to new pods until they are gated.

Only where the node's default is enforce or strict, by its label too: elsewhere a new interface must
stay open. A rule set knows neither pod nor namespace, so pods of an enforced namespace on a node in
audit are not blocked; podgate-cni gates those before they start.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator

import structlog

from agent import tasks
from agent.default_deny import installed
from agent.default_deny import table as default_deny_table
from agent.default_deny.ruleset import TABLE
from agent.default_deny.table import DefaultDenyError, DefaultDenyTable
from agent.kubelet.search import KubeletCgroup
from agent.linux import nft, rtnetlink
from agent.linux.nft_monitor import Deleted
from agent.linux.pods_cgroup import PodsCgroup
from agent.linux.rtnetlink import Link
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.pod_modes import PodModes
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

# A veth that no pod has claimed for this time belongs to no gated pod: it is released, since its
# owner needs it. A pod's manifest comes within a second of its interface.
_UNCLAIMED_SECONDS = 10.0
# While there is an interface that no pod has claimed.
_UNCLAIMED_PERIOD_SECONDS = _UNCLAIMED_SECONDS / 5
# How often the tables are compared with their desired content, without a message that something of
# them was deleted.
_ENSURE_SECONDS = 30.0
# Three times in the ruleset's `stale_seconds`.
_BEAT_SECONDS = 20.0
_TIMEOUT_SECONDS = 10


FindLost = Callable[[Collection[int]], Awaitable[Collection[int]]]
"""Which of these interfaces should have a gate and have none, as the kernel has it now."""


class DefaultDenyController:
    """Joins the table with the pods in the store. Without a table, every method does nothing."""

    def __init__(
        self,
        store: PodStore,
        modes: PodModes,
        find_lost: FindLost,
        *,
        is_off: Callable[[], bool],
        pods_read_at: Callable[[], float],
        request_read: Callable[[], None],
        abandoned_seconds: int = 86_400,
        pods_cgroup: PodsCgroup | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """abandoned_seconds: as `DefaultDenyTable.open`; is_off: whether the node was just switched
        off, so that the tables are missing on purpose; it may block; pods_read_at: when
        the newest complete read of the node's pods started, by the same clock as `now`;
        request_read: requests another one."""
        self._table: DefaultDenyTable | None = None
        self._is_desired = False
        """Whether the tables are, or would be if this machine could have them."""
        self._store = store
        self._find_lost = find_lost
        self._lost: frozenset[int] = frozenset()
        self._modes = modes
        self._is_off = is_off
        self._pods_read_at, self._request_read = pods_read_at, request_read
        self._abandoned_seconds = abandoned_seconds
        self._pods_cgroup = pods_cgroup
        self._wake = asyncio.Event()
        self._changed_modes = modes.changes.subscribe(Subscription(self._wake))
        self._changes = store.in_force.subscribe()
        # Removed pods.
        store.desired.subscribe(self._changes)
        self._announced: dict[str, set[int]] = {}
        """By pod's uid: interfaces that the table has as gated."""
        self._opened: dict[str, set[int]] = {}
        """Of these, those whose transaction is finished."""
        self._transaction_finished = asyncio.Event()
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._first_seen: dict[int, float] = {}
        self._exempt: set[int] = set()
        self._kubelet: KubeletCgroup | None = None
        self._priority: int | None = None
        self._has_kubelet_cgroup = True
        self._is_kubelet_new = False
        self._is_ruleset_suspect = False
        self._may_be_unclaimed = True
        """Whether links, or the pods that claim them, may have changed since they were read."""

    async def open(self, gated: Iterable[int]) -> None:
        """Install the tables where the node's default mode needs them, else remove old ones.

        Old ones also stay while the node's label is unknown, which may be their reason.
        """
        self._changed_modes.take()
        if self._modes.default >= Mode.ENFORCE or (
            not self._has_all_labels and await _is_installed()
        ):
            await self._install(gated)
        else:
            await _remove_quietly()

    async def _install(self, gated: Iterable[int]) -> None:
        self._is_desired = True
        table = await DefaultDenyTable.open(
            gated=gated,
            abandoned_seconds=self._abandoned_seconds,
            pods_cgroup=self._pods_cgroup,
        )
        if not table.available:
            log.warning(Event.DEFAULT_DENY_UNAVAILABLE, reason=table.reason_unavailable)
            return
        self._table = table
        log.info(
            Event.DEFAULT_DENY_READY,
            bridges=table.covers_bridges,
            datagrams=table.covers_datagrams,
        )

    @property
    def is_desired(self) -> bool:
        """Whether this node should have the tables."""
        return self._is_desired

    @property
    def is_installed(self) -> bool:
        """Whether this node has the tables."""
        return self._table is not None

    async def opened(self, state: PodState) -> None:
        """Wait until the tables leave all interfaces of a gated pod to their gates, or the pod is
        removed; at once without tables."""
        while self._is_blocking(state):
            await self._transaction_finished.wait()

    def _is_blocking(self, state: PodState) -> bool:
        uid = state.pod.uid
        is_open = state.gates.keys() <= self._opened.get(uid, set())
        return self._table is not None and self._store.get(uid) is state and not is_open

    async def add_gated(self, ifindexes: Iterable[int]) -> None:
        """These have their gates, or are meant to have none: the gates alone decide."""
        if self._table is not None:
            with _log_errors(Event.DEFAULT_DENY_GATE_NOT_ADDED):
                await self._table.gate(ifindexes)

    def hint_deleted(self, deleted: Deleted | None) -> None:
        """Other programs deleted these tables, chains and rules of nftables; None: any."""
        chains = {name for _, _, name in self._table.chains} if self._table else set()
        if deleted is None or any(t == TABLE and (not c or c in chains) for t, c in deleted):
            self._is_ruleset_suspect = True
            self._wake.set()

    def hint_links(self) -> None:
        """Interfaces of the host were added or removed."""
        self._may_be_unclaimed = True
        self._wake.set()

    def set_lost(self, lost: frozenset[int]) -> None:
        """All interfaces whose gates another program removed and that cannot be put back: the
        tables block them again, at once."""
        changed, self._lost = self._lost ^ lost, lost
        for state in self._store.states():
            if state.interface_indexes & changed:
                self._changes.mark(state.pod.uid)

    def set_kubelet(
        self, kubelet: KubeletCgroup | None, priority: int | None = None, *, has_cgroup: bool
    ) -> None:
        """Let the kubelet reach pods that have no gate yet; `run` does it at once.

        priority: of its sockets, where the kernel follows it without the agent; has_cgroup: whether
        gates admit one cgroup, also if the kubelet is missing now.
        """
        self._kubelet, self._priority, self._has_kubelet_cgroup = kubelet, priority, has_cgroup
        self._is_kubelet_new = True
        self._wake.set()

    async def run(self) -> None:
        """Keep the tables as the node's default needs them, until cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks.start(group, "default deny", self._maintain)
            tasks.start(group, "default deny of gated pods", self._follow_pods)

    async def _follow_pods(self) -> None:
        """Open the table for each interface whose gate is in force; several in one transaction,
        since changing a node's rule set takes longer than attaching a gate."""
        while True:
            added: set[int] = set()
            lost: set[int] = set()
            uids = await self._changes.next()
            for uid in uids:
                state = self._store.get(uid)
                if state is None:
                    self._announced.pop(uid, None)
                    self._opened.pop(uid, None)
                    self.hint_links()
                elif state.gated_netns is not None:
                    # A pass that finds nothing new costs nothing here.
                    before = self._announced.get(uid, set())
                    in_force = state.interface_indexes - self._lost
                    added |= in_force - before
                    lost |= before & self._lost
                    self._announced[uid] = in_force
            if added and self._table is not None:
                missing = await self._without_gate(added)
                for announced in self._announced.values():
                    announced -= missing
                await self.add_gated(added - missing)
            if lost and self._table is not None:
                with _log_errors(Event.DEFAULT_DENY_NOT_UPDATED):
                    await self._table.release(lost)
            self._opened |= {uid: self._announced[uid] for uid in uids if uid in self._announced}
            # Wakes those that wait now.
            self._transaction_finished.set()
            self._transaction_finished.clear()

    async def _without_gate(self, ifindexes: set[int]) -> set[int]:
        try:
            return set(await self._find_lost(ifindexes))
        except OSError as error:
            # The reconciler has attached them just now.
            log.error(Event.CHAIN_ORDER_UNKNOWN, error=str(error))
            return set()

    async def _maintain(self) -> None:
        while True:
            self._wake.clear()
            await self._follow_default()
            if self._table is None:
                await self._wake.wait()
            else:
                await self._maintain_table(self._table)

    async def _maintain_table(self, table: DefaultDenyTable) -> None:
        """Admit the kubelet, release unclaimed interfaces and restore the tables, as long as they
        are desired."""
        next_ensure = self._now() + _ENSURE_SECONDS
        next_beat = self._now()
        while self._table is table:
            await self._admit_kubelet(table)
            is_due = self._is_ruleset_suspect or self._now() >= next_ensure
            if self._may_be_unclaimed or is_due:
                await self._handle_links()
            with _log_errors(Event.DEFAULT_DENY_NOT_UPDATED):
                if self._now() >= next_beat:
                    next_beat = self._now() + _BEAT_SECONDS
                    await table.beat()
                if is_due and not await asyncio.to_thread(self._is_off):
                    self._is_ruleset_suspect = False
                    next_ensure = self._now() + _ENSURE_SECONDS
                    await table.ensure()
            with contextlib.suppress(TimeoutError):
                left = min(next_beat, next_ensure) - self._now()
                if self._may_be_unclaimed:
                    left = min(left, _UNCLAIMED_PERIOD_SECONDS)
                async with asyncio.timeout(left):
                    await self._wake.wait()
            self._wake.clear()
            await self._follow_default()

    async def _follow_default(self) -> None:
        """Install or remove the tables when labels of the node change its default."""
        self._changed_modes.take()
        is_desired = self._modes.default >= Mode.ENFORCE
        if is_desired and not self._is_desired:
            await self._install(self._claimed())
            self._is_kubelet_new = True
            # Gated meanwhile, and not added to a table.
            self._announced.clear()
            for uid in self._store.pods:
                self._changes.mark(uid)
        elif self._is_desired and not is_desired and self._has_all_labels:
            with _log_errors(Event.DEFAULT_DENY_NOT_REMOVED):
                if self._table is not None:
                    await self._table.remove()
                self._table = None
                self._is_desired = False
                self._first_seen.clear()
                self._exempt.clear()

    @property
    def _has_all_labels(self) -> bool:
        """Whether no label that is still unknown can be the reason for the tables."""
        return self._modes.is_complete or self._modes.node.is_off

    async def _admit_kubelet(self, table: DefaultDenyTable) -> None:
        # One that ended is back in a moment; until then its admission does no harm.
        is_due = self._kubelet is not None or not self._has_kubelet_cgroup
        if is_due and self._is_kubelet_new:
            self._is_kubelet_new = False
            path = self._kubelet.path if self._kubelet else None
            with _log_errors(Event.DEFAULT_DENY_KUBELET_NOT_SET):
                await table.admit(path, self._priority)

    def _claimed(self) -> set[int]:
        """Interfaces of relays, and of pods: gated, or meant not to be."""
        return self._store.relay_gates.keys() | {
            ifindex for state in self._store.states() for ifindex in state.interface_indexes
        }

    async def _handle_links(self) -> None:
        self._may_be_unclaimed = False
        has_unclaimed = True
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                found = await rtnetlink.read()
            with _log_errors(Event.DEFAULT_DENY_NOT_UPDATED):
                has_unclaimed = await self._release_unclaimed(found)
        finally:
            self._may_be_unclaimed |= has_unclaimed

    async def _release_unclaimed(self, found: list[Link]) -> bool:
        """Whether there are still some that may be a new pod's."""
        assert self._table is not None
        veths = {link.index for link in found if link.kind == "veth"}
        if vanished := self._exempt - veths:
            self._exempt -= vanished
            await self._table.release(vanished)
        unclaimed = veths - self._claimed() - self._exempt
        if any(state.status is None for state in self._store.states()):
            # A pod's first pass is still to come, late on a busy node: one of them may be its own.
            self._first_seen.clear()
        for ifindex in self._first_seen.keys() - unclaimed:
            del self._first_seen[ifindex]
        late = {
            ifindex
            for ifindex in unclaimed
            if self._now() - self._first_seen.setdefault(ifindex, self._now()) > _UNCLAIMED_SECONDS
        }
        # While the runtime does not respond, or the component that reads pods starts again, it may
        # be a new pod's.
        read_at = self._pods_read_at()
        due = {one for one in late if read_at - self._first_seen[one] > _UNCLAIMED_SECONDS}
        if late - due:
            self._request_read()
        if due:
            await self._table.exempt(due)
            self._exempt |= due
            log.info(Event.INTERFACES_RELEASED, interfaces=sorted(due))
        return bool(unclaimed - due)


async def _is_installed() -> bool:
    """Whether this network namespace has tables of a previous agent."""
    try:
        return bool(await installed.families())
    except (nft.NftError, TimeoutError):
        return False


@contextlib.contextmanager
def _log_errors(event: Event) -> Iterator[None]:
    """Errors of the default-deny table are only logged: gates work without it."""
    try:
        yield
    except DefaultDenyError as error:
        log.error(event, error=str(error))


async def _remove_quietly() -> None:
    with _log_errors(Event.DEFAULT_DENY_NOT_REMOVED):
        try:
            await default_deny_table.remove()
        except OSError as error:
            raise DefaultDenyError(str(error)) from error
