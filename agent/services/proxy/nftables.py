"""The nftables backend: a separate table in the node's network namespace.

One lookup finds the service of an address and one more its endpoint, for any number of services:
chains exist for each *number* of endpoints and not for each service. Only services with session
affinity have their own chains and sets, as in kube-proxy. Each change is one transaction.
"""

import collections
import contextlib
from collections.abc import Collection, Mapping, Sequence

import msgspec
import structlog

from agent.linux import nft
from agent.linux.nft_monitor import Deleted
from agent.logs import Event
from agent.services.proxy import conntrack, nft_scripts
from agent.services.proxy.backend import BackendError
from agent.services.proxy.frontends import Frontend, FrontendChange
from agent.services.proxy.nft_entries import Entry, NftChain, entries_of
from agent.services.proxy.nft_scripts import TABLE, InstalledTable
from bpf.abi import IPNetwork
from bpf.services.tables import ServiceAddress

log = structlog.get_logger(__name__)


class NftBackend:
    """Maintains the table. pod_networks: of this node's pods or all pods; traffic from other
    sources is external."""

    is_polled = False

    def __init__(self, pod_networks: Sequence[IPNetwork] = ()) -> None:
        self._pod_networks = tuple(pod_networks)
        self._installed: dict[ServiceAddress, Frontend] = {}
        self._users: collections.Counter[Entry] = collections.Counter()
        self._is_complete = False
        self._is_kept = False
        # Chains without rules that are still to be deleted.
        self._stale_chains: set[str] = set()

    def keep_table(self) -> None:
        """Have a table without services, too. To be called before `apply`."""
        self._is_kept = True

    async def apply(self, change: FrontendChange) -> None:
        """There is no table before the first service, but for `keep_table`."""
        moved: collections.Counter[Entry] = collections.Counter()
        for address in (*change.changed, *change.removed):
            if address in self._installed:
                moved.subtract(entries_of(address, self._installed[address]))
        for address, frontend in change.changed.items():
            moved.update(entries_of(address, frontend))
        try:
            await self._write(moved)
        except (nft.NftError, TimeoutError) as error:
            # The installed state is unknown: the next change writes the whole table.
            self._is_complete = False
            reason = str(error) or "nft timed out"
            raise BackendError(f"nft cannot apply the services: {reason}") from error
        self._users.update(moved)
        for entry in moved:
            if not self._users[entry]:
                del self._users[entry]
        self._installed |= change.changed
        for address in change.removed:
            self._installed.pop(address, None)
        await self._delete_stale_chains()
        await conntrack.follow(change)

    def is_concerned(self, deleted: Deleted) -> bool:
        """Chains of single services are deleted by `apply` all the time."""
        frame = {"", *nft_scripts.FRAME_CHAINS, *nft_scripts.BASE_CHAINS}
        return any(table == TABLE and chain in frame for table, chain in deleted)

    async def repair(self) -> bool:
        if not self._is_complete:
            return False
        try:
            if self._is_intact(await installed()):
                return False
            self._is_complete = False
            await self._write({})
        except (nft.NftError, TimeoutError, msgspec.MsgspecError) as error:
            reason = str(error) or "nft timed out"
            raise BackendError(f"nft cannot restore the services: {reason}") from error
        return True

    def _is_intact(self, table: InstalledTable | None) -> bool:
        """Whether it has all chains, with as many rules."""
        if table is None or not table.base_chains >= nft_scripts.BASE_CHAINS:
            return False
        if not all(table.rules[chain] for chain in nft_scripts.BASE_CHAINS):
            return False
        own = [entry for entry in self._users if isinstance(entry, NftChain)]
        return all(table.rules[chain.name] == len(chain.rules) for chain in own)

    async def close(self) -> None:
        """The backend has nothing open."""

    async def _write(self, moved: Mapping[Entry, int]) -> None:
        users = self._users
        added = [entry for entry, more in moved.items() if users[entry] + more > 0 >= users[entry]]
        removed = [
            entry for entry, more in moved.items() if users[entry] > 0 >= users[entry] + more
        ]
        is_late = any(isinstance(entry, NftChain) and entry.is_late for entry in added)
        if self._is_complete and not is_late:
            if added or removed:
                await nft.apply(nft_scripts.removal_of(removed) + nft_scripts.addition_of(added))
            self._stale_chains |= {entry.name for entry in removed if isinstance(entry, NftChain)}
            return
        entries = (users.keys() - removed) | set(added)
        await self._replace(entries)
        self._is_complete = bool(entries) or self._is_kept

    async def _replace(self, entries: Collection[Entry]) -> None:
        """Replace the table in one transaction that keeps clients' affinity."""
        if not entries and not self._is_kept:
            await _delete_table()
            return
        try:
            table = await installed()
            await nft.apply(nft_scripts.full_ruleset(entries, self._pod_networks, table))
            if table is not None:
                self._stale_chains = nft_scripts.unused_chains(table, entries)
        except (nft.NftError, msgspec.MsgspecError) as error:
            # Better services without the affinity of today's clients than none. For example, the
            # table of another version has other declarations.
            await nft.apply(nft_scripts.full_ruleset(entries, self._pod_networks))
            self._stale_chains.clear()
            log.warning(Event.CLIENT_AFFINITY_LOST, error=str(error))

    async def _delete_stale_chains(self) -> None:
        """A failure costs nothing: they are deleted after the next change."""
        self._stale_chains -= {entry.name for entry in self._users if isinstance(entry, NftChain)}
        if self._stale_chains:
            with contextlib.suppress(nft.NftError, TimeoutError):
                await nft.apply(nft_scripts.deletion_of(self._stale_chains))
                self._stale_chains.clear()


async def installed() -> InstalledTable | None:
    """The table, also another process'. Raises `NftError`, `TimeoutError` or
    `msgspec.MsgspecError`."""
    if not await _has_table():
        return None
    listing = await nft.query("--json", "--terse", "list", "table", "inet", TABLE)
    return nft_scripts.table_of(listing)


async def _has_table() -> bool:
    return f"table inet {TABLE}" in (await nft.query("list", "tables")).splitlines()


async def _delete_table() -> None:
    if await _has_table():
        await nft.apply(f"delete table inet {TABLE}\n")


async def remove() -> None:
    """Remove the table, also that of another process. Raises `BackendError`."""
    try:
        await _delete_table()
    except nft.NftMissingError:
        return
    except (nft.NftError, TimeoutError) as error:
        raise BackendError(
            f"the proxy's nftables cannot be removed: {error}; try 'nft delete table inet {TABLE}'"
        ) from error
