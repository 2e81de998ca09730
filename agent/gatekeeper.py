"""The gates, driven from the event loop: one worker thread makes the calls that wait for RTNL."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from agent.settings import Settings
from bpf import gates, loader, pins
from bpf.gates import Attachment, Counts, GateConfig
from bpf.nodeconfig import NodeConfig
from bpf.origin import Origin
from bpf.replies import Question

T = TypeVar("T")

# What a pod asked before its gate remembers is answered within this time or asked again:
# resolv.conf's default timeout is 5 s. It ends as soon as the pod's sockets tell what was asked.
_GRACE_SECONDS = 5.0

# An attach takes 10 ms and RTNL can be held for seconds by others; longer means a hung kernel.
_TIMEOUT_SECONDS = 60


class Gatekeeper:
    """Owns the loaded programs and maps. Every method waits at most a minute."""

    def __init__(
        self,
        loaded: loader.Loaded,
        opened: gates.Gates,
        worker: concurrent.futures.ThreadPoolExecutor,
    ) -> None:
        self.loaded = loaded
        self._gates = opened
        self._worker = worker
        self._origin = Origin(loaded)
        self.config = NodeConfig(loaded)

    @classmethod
    async def open(cls, settings: Settings) -> "Gatekeeper":
        """Load what is not pinned yet. Raises `PinError` or `CompileError`."""
        installation = pins.Pins(settings.bpffs)
        loaded = await loader.load(installation)
        # One thread: tcx attaches wait for each other under RTNL anyway.
        worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gates")
        try:
            opened = await asyncio.get_running_loop().run_in_executor(
                worker, gates.Gates, loaded, installation, settings.attachment
            )
        except BaseException:
            worker.shutdown(wait=False)
            loaded.close()
            raise
        return cls(loaded, opened, worker)

    @property
    def attachment(self) -> Attachment:
        return self._gates.attachment

    async def aclose(self) -> None:
        """Close descriptors and the thread. Gates stay: they are pinned."""
        await self._call(self._gates.close)
        self._worker.shutdown(wait=False)
        self.loaded.close()

    async def install(self, ifindex: int, config: GateConfig) -> float:
        """As `Gates.install`, with a grace; how many seconds it took."""

        def install() -> None:
            self._gates.install(ifindex, config, grace_seconds=_GRACE_SECONDS)

        return await self._call(lambda: _timed(install))

    async def remember(self, ifindex: int) -> bool:
        """As `Gates.remember`."""
        return await self._call(lambda: self._gates.remember(ifindex))

    async def recall(
        self, ifindex: int, questions: Collection[Question], *, is_complete: bool
    ) -> bool:
        """As `Gates.recall`."""
        return await self._call(
            lambda: self._gates.recall(ifindex, questions, is_complete=is_complete)
        )

    async def remove(self, ifindex: int) -> None:
        await self._call(lambda: self._gates.remove(ifindex))

    async def installed(self) -> dict[int, GateConfig | None]:
        """As `Gates.installed`."""
        return await self._call(self._gates.installed)

    async def collect(self) -> None:
        """As `Gates.collect`."""
        await self._call(self._gates.collect)

    async def misplaced(self) -> set[int]:
        """As `Gates.misplaced`."""
        return await self._call(self._gates.misplaced)

    async def is_first(self, ifindex: int) -> bool:
        """As `Gates.is_first`."""
        return await self._call(lambda: self._gates.is_first(ifindex))

    async def move_first(self, ifindex: int) -> None:
        """As `Gates.move_first`."""
        await self._call(lambda: self._gates.move_first(ifindex))

    async def counts(self) -> dict[int, Counts]:
        """Reads maps only, so it does not queue behind attaches."""
        return await asyncio.to_thread(self._gates.counts)

    async def mark_origins(self, marks: Mapping[int, bool]) -> None:
        """Set or clear interfaces' bits in the origin map."""

        def mark() -> None:
            for ifindex, is_node_sent in marks.items():
                self._origin.mark(ifindex, is_node_sent=is_node_sent)

        await self._call(mark)

    async def marked_origins(self) -> set[int]:
        return await self._call(self._origin.marked)

    async def _call(self, function: Callable[[], T]) -> T:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(self._worker, function)


def _timed(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
