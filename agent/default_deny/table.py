"""The backstop: an nftables table that keeps pods' interfaces closed until their gates are on.

A gate comes 1 to 20 ms after its interface, and never when the agent is dead. Until podgate has
said what an interface is (`gate`, `exempt`), processes of the node open no conversation by it, but
for the kubelet. What pods send, what is forwarded and answers are not touched:
`agent.default_deny.ruleset`.

It is made for nodes whose default is enforce or strict. It does not hold out packet sockets on the
interface itself (CAP_NET_RAW, and the pod's own gate does), nor the kernel's own connections (NFS).
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Iterable

import structlog

from agent.default_deny import ruleset
from agent.errors import PodgateError
from agent.linux import nft
from agent.linux.cgroups import cgroup2_mount
from agent.linux.nft_cgroups import CgroupGoneError, CgroupMatches, SocketMatchError
from agent.logs import Event

log = structlog.get_logger(__name__)

_CONNTRACK_COUNT = pathlib.Path("/proc/sys/net/netfilter/nf_conntrack_count")


class DefaultDenyError(PodgateError):
    """The table could not be changed and is as it was; the message is one sentence."""


class DefaultDenyTable:
    """The node's tables, and what they should say. All methods are for one event loop.

    Where the backstop is not available, every method does nothing: `reason_unavailable` is to be
    said once, and the window between interface and gate stays what it is.
    """

    def __init__(
        self,
        wanted: ruleset.Ruleset,
        cgroup2: pathlib.PurePath | None,
        pods: Iterable[str] | None,
    ) -> None:
        """Use `open`."""
        mount = cgroup2 or cgroup2_mount()
        self._matches = None if mount is None else CgroupMatches(mount)
        self._pods = None if pods is None else tuple(pods)
        self._kubelet: str | None = None
        self._wanted = wanted
        self._standing = ""
        self._is_stale = False
        self._lock = asyncio.Lock()
        self._add: dict[int, str] = {}
        self._delete: dict[int, str] = {}
        self.reason_unavailable = ""
        """One sentence, or nothing when it is available."""

    @classmethod
    async def open(
        cls,
        *,
        gated: Iterable[int] = (),
        kubelet: str | None = None,
        pods: Iterable[str] | None = None,
        stale_seconds: int = 60,
        cgroup2: pathlib.PurePath | None = None,
    ) -> "DefaultDenyTable":
        """Put the tables there, or take over those of an earlier run, in one transaction.

        gated: interface numbers with a gate that stands. kubelet: its cgroup's path from the mount
        of cgroup v2, as `KubeletCgroup.path`; pods: likewise those below which pods are, else found
        by the names that kubelets use; cgroup2: that mount, else found in /proc/mounts.
        stale_seconds: after so long without `beat`, any process outside of pods counts as the
        kubelet for TCP: longer than the agent's restart, shorter than a pod's patience.

        The first time, every interface that exists is exempt until it is gated: among them may be
        the node's own uplink (in kind it is a veth), and they were born open anyway. Later runs
        keep what was in the sets, so what was born while no agent ran stays closed.

        Never raises because of the machine: what is missing is `reason_unavailable`.
        """
        wanted = ruleset.Ruleset(tracks=_tracks_connections(), stale_seconds=stale_seconds)
        self = cls(wanted, cgroup2, pods)
        try:
            await self._check_kernel()
            before = await _sets_of_earlier_run()
            if before is None:
                wanted.not_pods = {ifindex for ifindex, _ in socket.if_nameindex()}
            else:
                wanted.gated, wanted.not_pods = before
            wanted.gated |= set(gated)
            wanted.not_pods -= wanted.gated
            if kubelet is not None:
                with contextlib.suppress(CgroupGoneError):  # restarting; `admit` follows
                    wanted.kubelet = self._match.of(kubelet)
                    self._kubelet = kubelet
            await self._put()
        except (SocketMatchError, nft.NftError, TimeoutError) as error:
            self.reason_unavailable = (
                "without the nftables backstop a new pod is open to the node until its gate is on: "
                f"{_words(error)}."
            )
        return self

    @property
    def available(self) -> bool:
        return not self.reason_unavailable

    @property
    def _match(self) -> CgroupMatches:
        if self._matches is None:
            raise SocketMatchError("no cgroup v2 is mounted to tell the kubelet by")
        return self._matches

    @property
    def covers_bridges(self) -> bool:
        """Whether it also closes pods behind a bridge (CONFIG_NF_TABLES_BRIDGE)."""
        return self.available and self._wanted.has_bridge

    @property
    def covers_datagrams(self) -> bool:
        """Whether it also closes to what is not TCP: only where connections are tracked already."""
        return self.available and self._wanted.tracks

    async def gate(self, ifindexes: Iterable[int]) -> None:
        """From now on these interfaces' gates alone decide. To be called when they are attached,
        and for pods that are to have none (mode off). Raises `DefaultDenyError`.
        """
        await self._move(ifindexes, ruleset.GATED)

    async def exempt(self, ifindexes: Iterable[int]) -> None:
        """These are no pods' interfaces: uplinks, veth pairs within the node, other containers'.

        Raises `DefaultDenyError`.
        """
        await self._move(ifindexes, ruleset.NOT_PODS)

    async def release(self, ifindexes: Iterable[int]) -> None:
        """These are gone, or unknown again, and so closed. Raises `DefaultDenyError`."""
        await self._move(ifindexes, None)

    async def admit(self, kubelet: str | None) -> None:
        """Let the kubelet in this cgroup (and below it) reach pods without gates; none: nobody.

        Call it for every new cgroup, also of the same path: the kernel goes by the cgroup's id.
        Raises `DefaultDenyError`; then the one before stays admitted.
        """
        async with self._lock:
            if not self.available:
                return
            before = self._wanted.kubelet, self._kubelet
            try:
                self._wanted.kubelet = None if kubelet is None else self._match.of(kubelet)
                self._kubelet = kubelet
                await self._apply(self._wanted.admission())
            except SocketMatchError as error:
                raise DefaultDenyError(str(error)) from error
            except DefaultDenyError:
                self._wanted.kubelet, self._kubelet = before
                raise

    async def beat(self) -> None:
        """Say that the agent lives. To be called three times in `stale_seconds`, whatever else.

        Raises `DefaultDenyError`.
        """
        async with self._lock:
            if self.available:
                await self._apply(self._wanted.heartbeat())

    async def ensure(self) -> bool:
        """Put the tables back if somebody removed or changed them; whether that was so.

        To be called now and then, such as with every full look at the pods.
        `nft flush ruleset`, which is what a restart of nftables.service does, takes ours along.
        Raises `DefaultDenyError`.
        """
        async with self._lock:
            if not self.available:
                return False
            await self._track()
            try:
                if await self._listing() == self._standing:
                    return False
            except (nft.NftError, TimeoutError) as error:
                raise DefaultDenyError(f"nftables cannot be read: {_words(error)}") from error
            self._is_stale = True
            await self._apply("")
        log.warning(Event.DEFAULT_DENY_TABLE_RESTORED)
        return True

    async def remove(self) -> None:
        """Take the tables away, in one step. Raises `DefaultDenyError`."""
        async with self._lock:
            if not self.available:
                return
            await remove()
            self.reason_unavailable = "the nftables backstop was removed."

    async def _track(self) -> None:
        """Hold back what is not TCP as well, once somebody has begun to track connections."""
        if self._wanted.tracks or not _tracks_connections():
            return
        self._wanted.tracks = self._is_stale = True
        try:
            await self._apply("")
        except DefaultDenyError:
            self._wanted.tracks = False
            raise

    async def _move(self, ifindexes: Iterable[int], to: str | None) -> None:
        for ifindex in ifindexes:
            self._note(ifindex, to)
        # Whoever comes first writes for all that wait behind: bursts of pods are a few scripts.
        async with self._lock:
            if not self.available or not (self._add or self._delete or self._is_stale):
                return
            add, delete = self._add, self._delete
            self._add, self._delete = {}, {}
            await self._apply(self._wanted.changes(add=add, delete=delete))

    def _note(self, ifindex: int, to: str | None) -> None:
        sets = {ruleset.GATED: self._wanted.gated, ruleset.NOT_PODS: self._wanted.not_pods}
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
        """Change the tables; when they are not what they should be, put them anew and whole."""
        was_stale, self._is_stale = self._is_stale, True
        try:
            try:
                if was_stale:
                    await self._put()
                else:
                    await nft.apply(script)
            except nft.NftError:
                await self._put()
        except (nft.NftError, TimeoutError) as error:
            raise DefaultDenyError(
                f"the nftables backstop stays as it is: {_words(error)}."
            ) from error
        self._is_stale = False

    async def _put(self) -> None:
        if self._kubelet is not None and not self._match.exists(self._kubelet):
            self._wanted.kubelet = self._kubelet = None  # nft would refuse the whole
        if self._pods is None:
            self._wanted.pods = await asyncio.to_thread(self._match.of_pods)
        else:
            self._wanted.pods = tuple(map(self._match.of, self._pods))
        self._add, self._delete = {}, {}
        await nft.apply(self._wanted.text())
        self._standing = await self._listing()

    async def _listing(self) -> str:
        """The rules without counters; empty when a chain is not there.

        One chain a call: nft 1.0.6 finds only one family's in a script. The kubelet's is left out:
        to print it, nft walks all of /sys/fs/cgroup, and its cgroup may be gone.
        """
        try:
            chains = self._wanted.chains()
            return "".join([await nft.query("--stateless", "list", "chain", *c) for c in chains])
        except nft.NftMissingError:
            raise
        except nft.NftError:
            return ""

    async def _check_kernel(self) -> None:
        """Let the kernel look at the whole ruleset, without bridges if it cannot filter those.

        Raises `SocketMatchError` or `NftError`.
        """
        match = self._match.match_none()
        for has_bridge in (True, False):
            self._wanted.has_bridge = has_bridge
            trial = dataclasses.replace(self._wanted, kubelet=match)
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
    """Take the tables away, whoever put them there. Needs no agent.

    Raises `DefaultDenyError`. Where there is no nft command there is nothing to remove.
    """
    try:
        if families := await _families_present():
            await nft.apply(ruleset.removal(families))
    except nft.NftMissingError:
        return
    except (nft.NftError, TimeoutError) as error:
        raise DefaultDenyError(
            f"the nftables backstop cannot be removed: {_words(error)}; try "
            f"'nft delete table inet {ruleset.TABLE}' and the same with 'bridge'."
        ) from error


async def _families_present() -> tuple[str, ...]:
    lines = (await nft.query("list", "tables")).splitlines()
    return tuple(f for f in ruleset.FAMILIES if f"table {f} {ruleset.TABLE}" in lines)


async def _sets_of_earlier_run() -> tuple[set[int], set[int]] | None:
    """Gated and exempt interfaces that still exist; None if there is no whole table of ours."""
    found = []
    for name in (ruleset.GATED, ruleset.NOT_PODS):
        try:
            text = await nft.query("--json", "list", "set", "inet", ruleset.TABLE, name)
        except nft.NftMissingError:
            raise
        except nft.NftError:
            return None
        found.append(ruleset.elements_of(text, socket.if_nameindex()))
    return found[0], found[1]


def _tracks_connections() -> bool:
    """Whether this network namespace tracks connections: if so, some are being tracked."""
    try:
        return int(_CONNTRACK_COUNT.read_text()) > 0
    except (OSError, ValueError):
        return False


def _words(error: Exception) -> str:
    return str(error) or "nft did not answer in time"
