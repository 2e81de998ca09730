"""The default-deny table: an nftables table that blocks new pods until their gates are attached.

A gate is attached 1 to 20 ms after its interface appears, and not at all while no agent runs. Until
podgate has classified an interface (`gate`, `exempt`), the table drops new flows of host processes
to it, except the kubelet's. Packets from pods, forwarded packets and replies always pass; see
`agent.default_deny.ruleset`.

It is for nodes whose default mode is enforce or strict. It blocks neither packet sockets on the
interface itself (they need CAP_NET_RAW, and the pod's gate blocks them) nor the kernel's own
connections (NFS).
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Iterable

import structlog

from agent.default_deny import installed, ruleset
from agent.errors import PodgateError
from agent.linux import nft
from agent.linux.cgroups import cgroup2_mount
from agent.linux.nft_cgroups import CgroupGoneError, CgroupMatches, SocketMatchError
from agent.linux.pods_cgroup import PodsCgroup
from agent.logs import Event

log = structlog.get_logger(__name__)

# To install a script whose cgroups may end meanwhile.
_ATTEMPTS = 4


class DefaultDenyError(PodgateError):
    """The table could not be changed and keeps its content; the message is one sentence."""


class DefaultDenyTable:
    """The node's tables and their desired content. All methods belong to one event loop.

    Where nftables cannot be used, every method does nothing: the user of the class logs
    `reason_unavailable` once, and new pods are open between interface and gate.
    """

    def __init__(
        self,
        desired: ruleset.Ruleset,
        cgroup2: pathlib.PurePath | None,
        pods: Iterable[str] | None,
        pods_cgroup: PodsCgroup | None,
    ) -> None:
        """Use `open`."""
        mount = cgroup2 or cgroup2_mount()
        self._matches = None if mount is None else CgroupMatches(mount, pods_cgroup)
        self._pods = None if pods is None else tuple(pods)
        self._kubelet: str | None = None
        self._desired = desired
        self._installed = ""
        self._generation: int | None = None
        """Of a ruleset with the expected content: as `nft.generation`."""
        self._is_stale = False
        self._lock = asyncio.Lock()
        self._add: dict[int, str] = {}
        self._delete: dict[int, str] = {}
        self.reason_unavailable = ""
        """One sentence; empty if the table is available."""

    @classmethod
    async def open(
        cls,
        *,
        gated: Iterable[int] = (),
        kubelet: str | None = None,
        pods: Iterable[str] | None = None,
        stale_seconds: int = 60,
        abandoned_seconds: int = 86_400,
        cgroup2: pathlib.PurePath | None = None,
        pods_cgroup: PodsCgroup | None = None,
    ) -> "DefaultDenyTable":
        """Install the tables, or take over those of the previous run, in one transaction.

        gated: numbers of interfaces whose gate is attached. kubelet: the path of its cgroup below
        the mount of cgroup v2, as `KubeletCgroup.path`; pods: paths of the cgroups that contain
        pods, by default found by the names that kubelets use; cgroup2: the mount, by default found
        in /proc/mounts. stale_seconds: after this time without `beat`, any process outside of pods
        counts as the kubelet for TCP. It is longer than a restart of the agent takes, and shorter
        than pods survive failing probes. abandoned_seconds: the same while a priority is admitted
        (`admit`); 0: never.

        The first run exempts every existing interface until it is gated: the node's own uplink may
        be among them (of kind veth), and they were open until now anyway. Later runs keep the
        content of the sets, so interfaces that were created while no agent ran stay blocked.

        Never raises because of the machine: `reason_unavailable` names what is missing.
        """
        desired = ruleset.Ruleset(
            tracks=installed.tracks_connections(),
            stale_seconds=stale_seconds,
            abandoned_seconds=abandoned_seconds,
        )
        self = cls(desired, cgroup2, pods, pods_cgroup)
        try:
            await self._check_kernel()
            before = await installed.interface_sets()
            if before is None:
                desired.not_pods = {ifindex for ifindex, _ in socket.if_nameindex()}
            else:
                desired.gated, desired.not_pods = before
            desired.gated |= set(gated)
            desired.not_pods -= desired.gated
            if kubelet is not None:
                with contextlib.suppress(CgroupGoneError):  # restarting; `admit` follows
                    desired.kubelet = self._match.of(kubelet)
                    self._kubelet = kubelet
            await self._put()
        except (SocketMatchError, nft.NftError, TimeoutError) as error:
            self.reason_unavailable = (
                "Without the default-deny table the host reaches a new pod until its gate is "
                f"attached: {_words(error)}."
            )
        return self

    @property
    def available(self) -> bool:
        return not self.reason_unavailable

    @property
    def _match(self) -> CgroupMatches:
        if self._matches is None:
            raise SocketMatchError("without a cgroup v2 mount the kubelet cannot be identified")
        return self._matches

    @property
    def chains(self) -> list[tuple[str, str, str]]:
        """Family, table and name of those that `ensure` compares."""
        return self._desired.chains() if self.available else []

    @property
    def covers_bridges(self) -> bool:
        """Whether it also blocks new flows to pods behind a bridge (CONFIG_NF_TABLES_BRIDGE)."""
        return self.available and self._desired.has_bridge

    @property
    def covers_datagrams(self) -> bool:
        """Whether it also blocks protocols other than TCP: only if connections are tracked."""
        return self.available and self._desired.tracks

    async def gate(self, ifindexes: Iterable[int]) -> None:
        """Leave these interfaces to their gates; called when gates are attached, and for pods that
        get none (mode off). Raises `DefaultDenyError`.
        """
        await self._move(ifindexes, ruleset.GATED)

    async def exempt(self, ifindexes: Iterable[int]) -> None:
        """Open interfaces that belong to no pod: uplinks, veth pairs of the host or of containers.

        Raises `DefaultDenyError`.
        """
        await self._move(ifindexes, ruleset.NOT_PODS)

    async def release(self, ifindexes: Iterable[int]) -> None:
        """Block these again: they are unclassified or no longer exist.

        Raises `DefaultDenyError`.
        """
        await self._move(ifindexes, None)

    async def admit(self, kubelet: str | None, priority: int | None = None) -> None:
        """Admit the kubelet in this cgroup, and below it, to pods without gates.

        None: it is unknown, so TCP from all processes outside of pods is admitted.

        priority: as `KubeletUnit.priority`; with one, a missing heartbeat opens nothing. Call it
        for every new cgroup, also of the same path: the kernel compares the cgroup's id. Raises
        `DefaultDenyError`; then the previous one stays admitted.
        """
        async with self._lock:
            if not self.available:
                return
            desired = self._desired
            before = desired.kubelet, desired.is_kubelet_unknown, desired.priority, self._kubelet
            try:
                desired.kubelet = None if kubelet is None else self._match.of(kubelet)
                desired.is_kubelet_unknown = kubelet is None
                desired.priority, self._kubelet = priority, kubelet
                # The heartbeat's time depends on the priority.
                await self._apply(desired.admission() + desired.heartbeat())
            except SocketMatchError as error:
                raise DefaultDenyError(str(error)) from error
            except DefaultDenyError:
                desired.kubelet, desired.is_kubelet_unknown = before[:2]
                desired.priority, self._kubelet = before[2:]
                raise

    async def beat(self) -> None:
        """Write the agent's heartbeat; to be called three times per `stale_seconds`.

        Raises `DefaultDenyError`.
        """
        async with self._lock:
            if self.available:
                await self._apply(self._desired.heartbeat())

    async def ensure(self) -> bool:
        """Restore the tables if another program removed or changed them; whether it did.

        To be called periodically: nothing is listed while no other program has changed anything of
        nftables. A restart of nftables.service runs `nft flush ruleset`, which
        removes our tables, too, and may load an older copy of them. Raises `DefaultDenyError`.
        """
        async with self._lock:
            if not self.available:
                return False
            await self._track()
            generation = await nft.generation()
            if not self._is_stale and generation is not None and generation == self._generation:
                return False
            try:
                listing = await self._listing()
                # Also where the tables were removed just before `_put` has listed them.
                if listing and listing == self._installed and await self._has_own_sets():
                    # Sets that are about to be written were not compared.
                    self._generation = None if self._add or self._delete else generation
                    return False
            except (nft.NftError, TimeoutError) as error:
                raise DefaultDenyError(f"nftables cannot be read: {_words(error)}") from error
            self._is_stale = True
            await self._apply("")
        log.warning(Event.DEFAULT_DENY_TABLE_RESTORED)
        return True

    async def remove(self) -> None:
        """Remove the tables in one transaction. Raises `DefaultDenyError`."""
        async with self._lock:
            if not self.available:
                return
            await remove()
            self.reason_unavailable = "The default-deny table was removed."

    async def _track(self) -> None:
        """Cover protocols other than TCP once another program tracks connections."""
        if self._desired.tracks or not installed.tracks_connections():
            return
        self._desired.tracks = self._is_stale = True
        try:
            await self._apply("")
        except DefaultDenyError:
            self._desired.tracks = False
            raise

    async def _move(self, ifindexes: Iterable[int], to: str | None) -> None:
        for ifindex in ifindexes:
            self._plan(ifindex, to)
        # The first call writes for all that wait for the lock: a burst of pods makes few scripts.
        async with self._lock:
            if not self.available or not (self._add or self._delete or self._is_stale):
                return
            add, delete = self._add, self._delete
            self._add, self._delete = {}, {}
            await self._apply(self._desired.changes(add=add, delete=delete))

    def _plan(self, ifindex: int, to: str | None) -> None:
        sets = {ruleset.GATED: self._desired.gated, ruleset.NOT_PODS: self._desired.not_pods}
        for name, members in sets.items():
            if name != to and ifindex in members:
                members.discard(ifindex)
                # Not yet written: then there is nothing to delete.
                if self._add.pop(ifindex, None) is None:
                    self._delete[ifindex] = name
        if to is not None and ifindex not in sets[to]:
            sets[to].add(ifindex)
            self._add[ifindex] = to

    async def _apply(self, script: str) -> None:
        """Change the tables; install them as a whole if they differ from the expected content."""
        was_stale, self._is_stale = self._is_stale, True
        try:
            try:
                if was_stale:
                    await self._put()
                else:
                    await nft.apply(script)
                    self._count_transaction()
            except nft.NftError:
                await self._put()
        except (nft.NftError, TimeoutError) as error:
            raise DefaultDenyError(
                f"The default-deny table keeps its content: {_words(error)}."
            ) from error
        self._is_stale = False

    def _count_transaction(self) -> None:
        """One of this table. Any other program's leads to another generation."""
        if self._generation is not None:
            self._generation += 1

    async def _put(self) -> None:
        """Install everything; nft rejects a cgroup that ended after it was read, so read again."""
        self._generation = None
        await self._read_cgroups()
        for attempts_left in reversed(range(_ATTEMPTS)):
            self._add, self._delete = {}, {}
            before = self._desired.kubelet, self._desired.pods
            try:
                await nft.apply(self._desired.text())
                break
            except nft.NftError:
                await self._read_cgroups()
                if not attempts_left or before == (self._desired.kubelet, self._desired.pods):
                    raise
        self._installed = await self._listing()

    async def _read_cgroups(self) -> None:
        if self._kubelet is not None and not self._match.exists(self._kubelet):
            self._desired.kubelet = self._kubelet = None
        if self._pods is None:
            self._desired.pods = await asyncio.to_thread(self._match.of_pods)
        else:
            self._desired.pods = tuple(map(self._match.of, self._pods))

    async def _listing(self) -> str:
        """The rules without counters; empty if a chain is missing.

        One chain per call: nft 1.0.6 finds only one family's in a script. Not the kubelet's: to
        print it, nft walks all of /sys/fs/cgroup, and its cgroup may be gone.
        """
        try:
            chains = self._desired.chains()
            return "".join([await nft.query("--stateless", "list", "chain", *c) for c in chains])
        except nft.NftMissingError:
            raise
        except nft.NftError:
            return ""

    async def _has_own_sets(self) -> bool:
        """Whether the sets have the existing interfaces that they should. Raises `NftError`."""
        if self._add or self._delete:
            return True  # about to be written
        found = await installed.interface_sets()
        existing = {ifindex for ifindex, _ in socket.if_nameindex()}
        desired = (self._desired.gated & existing, self._desired.not_pods & existing)
        return found is not None and tuple(one & existing for one in found) == desired

    async def _check_kernel(self) -> None:
        """Have the kernel check the whole ruleset, without bridges if it cannot filter those.

        Raises `SocketMatchError` or `NftError`.
        """
        match = self._match.match_none()
        for has_bridge in (True, False):
            self._desired.has_bridge = has_bridge
            trial = dataclasses.replace(self._desired, kubelet=match, priority=1)
            try:
                await nft.apply(trial.text(), only_check=True)
            except nft.NftMissingError:
                raise
            except nft.NftError:
                if not has_bridge:
                    raise
            else:
                return


async def remove() -> None:
    """Remove the tables, also those of another agent. Needs no agent.

    Raises `DefaultDenyError`. Without an nft command there is nothing to remove.
    """
    try:
        if families := await installed.families():
            await nft.apply(ruleset.removal(families))
    except nft.NftMissingError:
        return
    except (nft.NftError, TimeoutError) as error:
        raise DefaultDenyError(
            f"The default-deny table cannot be removed: {_words(error)}; try "
            f"'nft delete table inet {ruleset.TABLE}' and the same with 'bridge'."
        ) from error


def _words(error: Exception) -> str:
    return str(error) or "nft did not answer in time"
