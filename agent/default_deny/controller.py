"""Keeps new pods closed to the node until their gates stand: the backstop, driven by the agent.

Only where the node's default is enforce or strict: elsewhere a new interface must stay open.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

import pyroute2
import structlog

from agent.default_deny import table as default_deny_table
from agent.default_deny.table import DefaultDenyError, DefaultDenyTable
from agent.kubelet.search import KubeletCgroup
from agent.linux import rtnetlink
from agent.linux.rtnetlink import Link
from agent.settings import Settings
from bpf.verdicts import Mode

log = structlog.get_logger(__name__)

# A veth that no pod has claimed for so long is no pod's that this agent guards: it is released, as
# whoever made it needs it. A pod's manifest comes within a second of its interface.
_UNCLAIMED_SECONDS = 10.0
# How often the tables are compared with what they should say; `nft flush ruleset` tells nobody.
_ENSURE_SECONDS = 30.0
# Three times in the backstop's `stale_seconds`.
_BEAT_SECONDS = 20.0
_TIMEOUT_SECONDS = 10


class DefaultDenyController:
    """The backstop with its owner's knowledge of pods. Without one, every method does nothing."""

    def __init__(
        self,
        table: DefaultDenyTable | None,
        *,
        claimed: Callable[[], set[int]],
        now: Callable[[], float] | None = None,
    ) -> None:
        """claimed: interfaces of pods that are gated, or meant not to be."""
        self._table = table
        self._claimed = claimed
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._first_seen: dict[int, float] = {}
        self._exempt: set[int] = set()
        self._kubelet: KubeletCgroup | None = None
        self._kubelet_changed = asyncio.Event()

    @classmethod
    async def open(
        cls, settings: Settings, gated: Iterable[int], *, claimed: Callable[[], set[int]]
    ) -> "DefaultDenyController":
        """Put the tables there where the node's default asks for it, else take old ones away."""
        if settings.mode not in (Mode.ENFORCE, Mode.STRICT):
            await _remove_quietly()
            return cls(None, claimed=claimed)
        table = await DefaultDenyTable.open(gated=gated)
        if not table.available:
            log.warning("new pods are not born closed", reason=table.reason_unavailable)
            return cls(None, claimed=claimed)
        log.info(
            "new pods are born closed",
            bridges=table.covers_bridges,
            datagrams=table.covers_datagrams,
        )
        return cls(table, claimed=claimed)

    async def gate(self, ifindexes: Iterable[int]) -> None:
        """These have their gates, or are meant to have none: the gates alone decide."""
        if self._table is not None:
            with _said("an interface stays closed to the node by the backstop"):
                await self._table.gate(ifindexes)

    def admit(self, kubelet: KubeletCgroup | None) -> None:
        """Let the kubelet reach pods that have no gate yet; `run` does it at once."""
        self._kubelet = kubelet
        self._kubelet_changed.set()

    async def run(self) -> None:
        """Admit the kubelet, release what nobody claims, put back what was taken away; for ever."""
        if self._table is None:
            await asyncio.Event().wait()
            return
        next_ensure = self._now() + _ENSURE_SECONDS
        next_beat = self._now()
        async with pyroute2.AsyncIPRoute() as netlink:
            while True:
                if self._kubelet_changed.is_set():
                    self._kubelet_changed.clear()
                    # One that ended is back in a moment; until then its admission harms nobody.
                    if self._kubelet is not None:
                        with _said("the kubelet does not reach pods without gates"):
                            await self._table.admit(self._kubelet.path)
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    found = await rtnetlink.read(netlink)
                with _said("the backstop could not be brought up to date"):
                    await self._release_unclaimed(found)
                    if self._now() >= next_beat:
                        next_beat = self._now() + _BEAT_SECONDS
                        await self._table.beat()
                    if self._now() >= next_ensure:
                        next_ensure = self._now() + _ENSURE_SECONDS
                        await self._table.ensure()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_UNCLAIMED_SECONDS / 5):
                        await self._kubelet_changed.wait()

    async def _release_unclaimed(self, found: list[Link]) -> None:
        assert self._table is not None
        veths = {link.index for link in found if link.kind == "veth"}
        gone = (self._first_seen.keys() | self._exempt) - veths
        for ifindex in gone:
            self._first_seen.pop(ifindex, None)
        if vanished := self._exempt & gone:
            self._exempt -= vanished
            await self._table.release(vanished)
        unclaimed = veths - self._claimed() - self._exempt
        for ifindex in self._first_seen.keys() - unclaimed:
            del self._first_seen[ifindex]
        due = {
            ifindex
            for ifindex in unclaimed
            if self._now() - self._first_seen.setdefault(ifindex, self._now()) > _UNCLAIMED_SECONDS
        }
        if due:
            await self._table.exempt(due)
            self._exempt |= due
            log.info("interfaces of no pod are left open to the node", interfaces=sorted(due))


@contextlib.contextmanager
def _said(consequence: str) -> Iterator[None]:
    """Trouble with the backstop is logged and no more: gates do their work without it."""
    try:
        yield
    except DefaultDenyError as error:
        log.error(consequence, error=str(error))


async def _remove_quietly() -> None:
    with _said("an old backstop may be left"):
        try:
            await default_deny_table.remove()
        except (OSError, TimeoutError) as error:
            raise DefaultDenyError(str(error)) from error
