"""Another program's change of a chain is noticed, though nothing is read until then."""

import asyncio
import contextlib
import os
from collections.abc import Iterator

import pytest

from agent.gates.chain_changes import POLL_SECONDS, ChainChanges
from agent.lab.lab import Lab
from bpf import memory_watch, syscalls
from bpf.tcx_chains import TcxChains
from tests import polling
from tests.kernel import offers
from tests.kernel.test_tcx_chains import EGRESS, attach, program

pytestmark = pytest.mark.kernel

CHANGES = 5


class CountedChains(TcxChains):
    """How often they were read."""

    reads = 0

    def state(self) -> bytes:
        self.reads += 1
        return super().state()


@pytest.fixture
def link(lab: Lab) -> Iterator[int]:
    offers.need_tcx()
    with program() as ours:
        made = syscalls.link_create_tcx(ours, lab.add_pod("web", 1).ifindex, EGRESS, 0)
    yield made
    os.close(made)


async def test_change_is_noticed_and_chains_at_rest_are_not_read(lab: Lab, link: int) -> None:
    ifindex = lab.pods["web"].ifindex
    noticed = asyncio.Event()
    chains = CountedChains()
    with contextlib.closing(ChainChanges(chains, noticed.set)) as changes, program() as others:
        changes.compare_by(await memory_watch.load(POLL_SECONDS))
        for command in [syscalls.Command.PROG_ATTACH, syscalls.Command.PROG_DETACH] * CHANGES:
            state = changes.state()
            assert state is not None
            changes.watch(state, POLL_SECONDS)
            await asyncio.sleep(2 * POLL_SECONDS)
            reads = chains.reads
            await asyncio.sleep(2 * POLL_SECONDS)
            assert chains.reads == reads
            flags = syscalls.BPF_F_BEFORE if command is syscalls.Command.PROG_ATTACH else 0
            # It waits for RCU; the chain changes in the meantime.
            await asyncio.to_thread(attach, command, others, ifindex, flags)
            async with asyncio.timeout(10 * polling.PATIENCE):
                await noticed.wait()
            noticed.clear()
            changes.stop()
