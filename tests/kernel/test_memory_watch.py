"""The kernel reports changes of tcx chains that it compares itself, and nothing else."""

import asyncio
import contextlib
import os
import pathlib
import select
from collections.abc import Callable, Iterator

import pytest

from agent.lab.lab import Lab
from bpf import abi, artefacts, errors, memory_watch, syscalls
from bpf.memory_watch import MemoryWatch
from bpf.tcx_chains import TcxChains
from tests import polling
from tests.kernel import offers
from tests.kernel.test_prebuilt import open_descriptors, write_invalid
from tests.kernel.test_tcx_chains import EGRESS, attach, program

pytestmark = pytest.mark.kernel

PERIOD_SECONDS = 0.02


@pytest.fixture
def watch(isolated: None) -> Iterator[MemoryWatch]:
    offers.need_tcx()
    with contextlib.closing(asyncio.run(memory_watch.load(PERIOD_SECONDS))) as opened:
        yield opened


@pytest.fixture
def chains() -> Iterator[TcxChains]:
    with contextlib.closing(TcxChains()) as opened:
        yield opened


def is_reported(watch: MemoryWatch, seconds: float) -> bool:
    return bool(select.select([watch], [], [], seconds)[0])


def compare(watch: MemoryWatch) -> None:
    """Wait until words were compared since now: what has changed before is reported."""
    before = watch.comparisons()
    polling.wait_until("words are compared", lambda: watch.comparisons() > before + 1)


def test_each_kind_of_change_is_reported_once(
    lab: Lab, watch: MemoryWatch, chains: TcxChains
) -> None:
    ifindex = lab.add_pod("web", 1).ifindex
    with program() as ours, program() as others:
        link = syscalls.link_create_tcx(ours, ifindex, EGRESS, 0)
        ingress: list[int] = []

        def attach_ingress() -> None:
            ingress.append(syscalls.link_create_tcx(others, ifindex, syscalls.BPF_TCX_INGRESS, 0))

        changes: list[Callable[[], object]] = [
            lambda: attach(syscalls.Command.PROG_ATTACH, others, ifindex, syscalls.BPF_F_BEFORE),
            lambda: attach(syscalls.Command.PROG_DETACH, others, ifindex),
            lambda: syscalls.link_update(link, others),
            attach_ingress,
            lambda: os.close(ingress.pop()),
            lambda: syscalls.link_detach(link),
        ]
        for change in changes:
            assert watch.expect(chains.words(chains.state()))
            compare(watch)
            assert not is_reported(watch, 0)
            change()
            assert is_reported(watch, 10 * polling.PATIENCE)
            # Nothing more is compared, so nothing is reported again.
            assert watch.expect({})
            compare(watch)
            assert not is_reported(watch, 0)
        os.close(link)


def test_each_word_that_differs_is_named(watch: MemoryWatch) -> None:
    """What cannot be read counts as 0."""
    assert watch.expect({0: 0, 8: 1, 16: 2, 24: 0})
    assert is_reported(watch, 10 * polling.PATIENCE)
    assert watch.changed() == [8, 16]
    assert watch.expect({8: 0})
    compare(watch)
    assert watch.changed() == []


def test_deleted_interface_is_reported(lab: Lab, watch: MemoryWatch, chains: TcxChains) -> None:
    ifindex = lab.add_pod("web", 1).ifindex
    with program() as ours:
        link = syscalls.link_create_tcx(ours, ifindex, EGRESS, 0)
        assert watch.expect(chains.words(chains.state()))
        lab.remove_pod("web")
        assert is_reported(watch, 10 * polling.PATIENCE)
        os.close(link)


def test_more_words_than_there_is_room_for_are_not_compared(watch: MemoryWatch) -> None:
    assert not watch.expect(dict.fromkeys(range(abi.MAX_WATCHED_WORDS + 1), 1))
    compare(watch)
    assert not is_reported(watch, 0)
    assert watch.expect(dict.fromkeys(range(abi.MAX_WATCHED_WORDS), 1))
    assert is_reported(watch, 10 * polling.PATIENCE)


def test_nothing_is_left_open_without_a_clock(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "_SYSCALL_NUMBERS", {})
    before = open_descriptors()
    with pytest.raises(errors.BpfError, match="no perf_event_open"):
        asyncio.run(memory_watch.load(PERIOD_SECONDS))
    assert open_descriptors() == before


def test_nothing_is_left_open_where_the_kernel_rejects_the_program(
    prebuilt_programs: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_invalid(memory_watch.PROGRAM_SET, prebuilt_programs, tmp_path)
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    before = open_descriptors()
    with pytest.raises(errors.CompileError, match="R0 !read_ok"):
        asyncio.run(memory_watch.load(PERIOD_SECONDS))
    assert open_descriptors() == before
