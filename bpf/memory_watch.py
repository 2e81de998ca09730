"""Words of the kernel's memory that the kernel compares itself: a process is woken by a change
alone, not by each comparison.

A program runs at each overflow of a software clock, in the timer's interrupt (perf_event_open(2);
programs since Linux 4.9, 0515e5999a46). It takes 25 ns a word, and no lock. Where a word differs
from what is expected, it writes to a ring and compares nothing until the next `expect`. Words may
be of memory that the kernel has freed: the kernel reads them as tracing programs do, without a
fault, and they differ then, or are 0.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Mapping

from bpf import abi, errors, map_specs, maps, pinning
from bpf.program_sets import ProgramSet, ProgramSpec
from bpf.ringbuffer import RingBuffer

PROGRAM = "compare_words"
_PERF_EVENT = 7  # `enum bpf_prog_type`

PROGRAM_SET = ProgramSet(
    source="memory_watch.c",
    programs=(ProgramSpec(PROGRAM, PROGRAM, _PERF_EVENT),),
    maps=(map_specs.WATCHED_WORDS, map_specs.WORD_CHANGES),
    needs="Linux 5.8, CAP_PERFMON, and no lockdown for confidentiality",
)

_SYSCALL_NUMBERS = {
    "x86_64": 298,
    "aarch64": 241,
    "riscv64": 241,
    "loongarch64": 241,
    "s390x": 331,
    "ppc64le": 319,
}
_libc = ctypes.CDLL(None, use_errno=True)

# struct perf_event_attr up to config1: the first version, which each kernel takes.
_EVENT = struct.Struct("=IIQQQQQIIQ")
_TYPE_SOFTWARE, _CPU_CLOCK, _CLOSE_ON_EXEC = 1, 0, 1 << 3
_SET_PROGRAM = 0x40042408  # PERF_EVENT_IOC_SET_BPF

_KEY = bytes(4)


class MemoryWatch:
    """Compares words, and is readable (as for `select`) after a change. For one thread."""

    def __init__(self, loaded: Mapping[str, int], period_seconds: float) -> None:
        """Compares nothing yet. loaded: of `load`, owned from now on. Raises `BpfError` where the
        kernel has no such clock, or not for this process."""
        with contextlib.ExitStack() as opened:
            for descriptor in loaded.values():
                opened.callback(os.close, descriptor)
            self._words = maps.Map(loaded[map_specs.WATCHED_WORDS.name], map_specs.WATCHED_WORDS)
            clock = _open_clock(period_seconds)
            opened.callback(os.close, clock)
            self._ring = RingBuffer(
                loaded[map_specs.WORD_CHANGES.name], map_specs.WORD_CHANGES.max_entries
            )
            opened.callback(self._ring.close)
            try:
                fcntl.ioctl(clock, _SET_PROGRAM, loaded[PROGRAM])
            except OSError as error:
                raise errors.BpfError(error.errno, f"attaching to a clock: {error}") from error
            self._opened = opened.pop_all()
        self._expected = 0
        """How many words are compared until one differs."""

    def close(self) -> None:
        self._opened.close()

    def fileno(self) -> int:
        return self._ring.fd

    def expect(self, words: Mapping[int, int]) -> bool:
        """Compare these from now on, by address; also those that differ already are reported.

        False: there are more than `abi.MAX_WATCHED_WORDS`, and none is compared. Raises `BpfError`.
        """
        has_room = len(words) <= abi.MAX_WATCHED_WORDS
        watched = tuple(words.items()) if has_room else ()
        self._words.set(_KEY, bytes(abi.CWatchedWords(len(watched), 0, watched)))
        self._expected = len(watched)
        self.take()
        return has_room

    def take(self) -> None:
        """Forget that a change was reported."""
        for _ in self._ring.records():
            pass

    def changed(self) -> list[int]:
        """The addresses of the words that differed when they were compared last. Raises
        `BpfError`."""
        words = self._value().words[: self._expected]
        return [word.address for word in words if word.found != word.expected]

    def comparisons(self) -> int:
        """How often words were compared since `expect`. None after some periods: the clock has
        stopped, as with its CPU when that goes offline. Raises `BpfError`."""
        return int(self._value().comparisons)

    def _value(self) -> abi.CWatchedWords:
        value = self._words.get(_KEY)
        assert value is not None  # an array has all of its keys
        return abi.CWatchedWords.from_buffer_copy(value)


class Pulse:
    """Whether the clock of a watch still runs: it stops with its CPU, when that goes offline."""

    def __init__(self, memory: MemoryWatch, seconds: float, now: float) -> None:
        """seconds: in which a clock that runs compares at least once, also on a busy CPU; now: of
        any clock, in seconds."""
        self._memory = memory
        self._seconds = seconds
        self.note_expected(now)

    def note_expected(self, now: float) -> None:
        """`MemoryWatch.expect` was called, which counts again from 0."""
        self._comparisons, self._counted_at = 0, now

    def has_stopped(self, now: float) -> bool:
        """True also if that cannot be found out."""
        if now - self._counted_at < self._seconds:
            return False
        before = self._comparisons
        with contextlib.suppress(errors.BpfError):
            self._comparisons, self._counted_at = self._memory.comparisons(), now
        return self._comparisons == before


async def load(period_seconds: float) -> MemoryWatch:
    """Load the program, and have it compare words this often; pins nothing.

    Raises `CompileError` where it cannot be compiled or the kernel rejects it (no CAP_PERFMON,
    lockdown for confidentiality), `BpfError` where the kernel lacks something else, and `OSError`.
    """
    loaded = await pinning.load_unpinned(PROGRAM_SET)
    return await asyncio.to_thread(MemoryWatch, loaded, period_seconds)


def _open_clock(period_seconds: float) -> int:
    """One CPU's, also while that is idle. The first one on which this process may run is none that
    is isolated from others."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise errors.BpfError(errno.ENOSYS, f"no perf_event_open(2) for {platform.machine()}")
    attributes = ctypes.create_string_buffer(
        _EVENT.pack(
            *(_TYPE_SOFTWARE, _EVENT.size, _CPU_CLOCK, int(period_seconds * 1e9)),
            *(0, 0, 0, 0, 0, 0),
        )
    )
    cpu = min(os.sched_getaffinity(0))
    descriptor = int(_libc.syscall(number, attributes, -1, cpu, -1, _CLOSE_ON_EXEC))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise errors.BpfError(code, f"opening a clock: {os.strerror(code)}")
    return descriptor
