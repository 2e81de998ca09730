"""The state of all tcx chains: another one after each change of any of them."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from agent.lab.lab import Lab
from bpf import syscalls, tcx_chains
from bpf.tcx_chains import TcxChains
from tests.kernel import offers

pytestmark = pytest.mark.kernel

RETURN_0 = struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0)
SCHED_CLS = 3
EGRESS = syscalls.BPF_TCX_EGRESS


@contextlib.contextmanager
def program() -> Iterator[int]:
    descriptor = syscalls.program_load(SCHED_CLS, RETURN_0)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def chains() -> Iterator[TcxChains]:
    offers.need_tcx()
    with contextlib.closing(TcxChains()) as opened:
        yield opened


def part_of(link: int, chains: TcxChains) -> bytes | None:
    """What the state has of one link."""
    _, number = struct.unpack("=II", syscalls.object_info(link, 8))
    state = chains.state()
    size = tcx_chains.RECORD_BYTES
    records = [state[at : at + size] for at in range(0, len(state), size)]
    return next((one for one in records if int.from_bytes(one[:8], "little") == number), None)


def attach(command: syscalls.Command, program_fd: int, ifindex: int, flags: int = 0) -> None:
    """Without a link, as bpftool does."""
    attributes = struct.pack("=IIIIIIQ", ifindex, program_fd, EGRESS, flags, 0, 0, 0)
    syscalls.call(command, attributes, what="attaching without a link")


def test_each_change_of_a_chain_gives_another_state(lab: Lab, chains: TcxChains) -> None:
    ifindex = lab.add_pod("web", 1).ifindex
    with program() as ours, program() as others:
        link = syscalls.link_create_tcx(ours, ifindex, EGRESS, 0)
        seen = [part_of(link, chains)]
        assert seen[0] is not None
        assert part_of(link, chains) == seen[0]
        attach(syscalls.Command.PROG_ATTACH, others, ifindex, syscalls.BPF_F_BEFORE)
        seen.append(part_of(link, chains))
        attach(syscalls.Command.PROG_DETACH, others, ifindex)
        seen.append(part_of(link, chains))
        os.close(syscalls.link_create_tcx(others, ifindex, EGRESS, syscalls.BPF_F_BEFORE))
        seen.append(part_of(link, chains))
        assert None not in seen
        assert len(set(seen)) == len(seen)
        syscalls.link_detach(link)
        assert part_of(link, chains) is None
        os.close(link)


def test_links_of_other_namespaces_are_no_part_of_it(lab: Lab, chains: TcxChains) -> None:
    pod = lab.add_pod("web", 1)
    with program() as own:
        eth0 = pod.netns.run_inside(lambda: socket.if_nametoindex("eth0"))
        link = pod.netns.run_inside(lambda: syscalls.link_create_tcx(own, eth0, EGRESS, 0))
        assert part_of(link, chains) is None
        os.close(link)


def test_links_of_deleted_interfaces_are_no_part_of_it(lab: Lab, chains: TcxChains) -> None:
    ifindex = lab.add_pod("web", 1).ifindex
    with program() as gate:
        link = syscalls.link_create_tcx(gate, ifindex, EGRESS, 0)
        assert part_of(link, chains) is not None
        lab.remove_pod("web")
        assert part_of(link, chains) is None
        os.close(link)
