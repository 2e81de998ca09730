"""Words of the kernel's memory that the kernel compares itself: a process is woken by a change
alone, not by each comparison.

A program runs at each overflow of a software clock, in the timer's interrupt (perf_event_open(2);
programs since Linux 4.9, 0515e5999a46). It takes 25 ns a word, and no lock. Where a word differs
from what is expected, it writes to a ring and compares nothing until the next `expect`. Words may
be of memory that the kernel has freed: the kernel reads them as tracing programs do, without a
fault, and they differ then, or are 0.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Mapping

from bpf import errors, syscalls
from bpf.ringbuffer import RingBuffer

_SYSCALL_NUMBERS = {
    "x86_64": 298,
    "aarch64": 241,
    "riscv64": 241,
    "loongarch64": 241,
    "s390x": 331,
    "ppc64le": 319,
}
_libc = ctypes.CDLL(None, use_errno=True)

_BPF_PROG_TYPE_PERF_EVENT = 7
_ARRAY, _RING = 2, 27  # BPF_MAP_TYPE_RINGBUF, Linux 5.8
_LOOKUP, _PROBE_READ_KERNEL, _RING_OUTPUT = 1, 113, 130
# struct perf_event_attr up to config1: the first version, which each kernel takes.
_EVENT = struct.Struct("=IIQQQQQIIQ")
_TYPE_SOFTWARE, _CPU_CLOCK, _CLOSE_ON_EXEC = 1, 0, 1 << 3
_SET_PROGRAM = 0x40042408  # PERF_EVENT_IOC_SET_BPF

MOST_WORDS = 2048
"""The verifier follows each turn of the loop: 25 ms, once. One comparison of all takes 50 us."""
_RING_BYTES = 4096
_KEY = bytes(4)
_HEAD = struct.Struct("=QQ")  # how many words are compared; how often they were since `expect`
_WORD = struct.Struct("=QQ")  # address, expected value
_VALUE_BYTES = _HEAD.size + MOST_WORDS * _WORD.size


class MemoryWatch:
    """Compares words, and is readable (as for `select`) after a change. For one thread."""

    def __init__(self, period_seconds: float) -> None:
        """Compares nothing yet. Raises `BpfError` where the kernel does not offer it, or not to
        this process (CAP_PERFMON, lockdown for confidentiality)."""
        with contextlib.ExitStack() as opened:

            def own(descriptor: int) -> int:
                opened.callback(os.close, descriptor)
                return descriptor

            self._words = own(syscalls.map_create(_ARRAY, 4, _VALUE_BYTES, 1, name="words"))
            ring = own(syscalls.map_create(_RING, 0, 0, _RING_BYTES, name="word_changes"))
            program = own(
                syscalls.program_load(
                    _BPF_PROG_TYPE_PERF_EVENT, _program(self._words, ring), name="compare_words"
                )
            )
            clock = own(_open_clock(period_seconds))
            self._ring = RingBuffer(ring, _RING_BYTES)
            opened.callback(self._ring.close)
            try:
                fcntl.ioctl(clock, _SET_PROGRAM, program)
            except OSError as error:
                raise errors.BpfError(error.errno, f"attaching to a clock: {error}") from error
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def fileno(self) -> int:
        return self._ring.fd

    def expect(self, words: Mapping[int, int]) -> bool:
        """Compare these from now on, by address; also those that differ already are reported.

        False: there are more than `MOST_WORDS`, and none is compared. Raises `BpfError`.
        """
        count = len(words) if len(words) <= MOST_WORDS else 0
        pairs = b"".join(_WORD.pack(*word) for word in words.items()) if count else b""
        value = (_HEAD.pack(count, 0) + pairs).ljust(_VALUE_BYTES, b"\0")
        syscalls.map_update(self._words, _KEY, value)
        self.take()
        return count == len(words)

    def take(self) -> None:
        """Forget that a change was reported."""
        for _ in self._ring.records():
            pass

    def comparisons(self) -> int:
        """How often words were compared since `expect`. None after some periods: the clock has
        stopped, as with its CPU when that goes offline. Raises `BpfError`."""
        value = syscalls.map_lookup(self._words, _KEY, _VALUE_BYTES) or bytes(_VALUE_BYTES)
        return int(_HEAD.unpack_from(value)[1])


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


def _program(words_fd: int, ring_fd: int) -> bytes:
    """struct bpf_insn, 8 bytes each. r6: the map's value; r7: the number of the word; r8: how many
    there are."""
    load_64, store_64, move, set_to, add_to = 0x79, 0x7B, 0xBF, 0xB7, 0x07
    key, found = -4, -8  # on the stack, from its end
    report = [
        _instruction(set_to, 1),
        _instruction(store_64, 6, 1),
        *_map(ring_fd),
        _instruction(move, 2, 10),
        _instruction(add_to, 2, value=found),
        _instruction(set_to, 3, value=8),
        _instruction(set_to, 4),
        _instruction(0x85, value=_RING_OUTPUT),
    ]
    compare = [
        _instruction(move, 1, 10),
        _instruction(add_to, 1, value=found),
        _instruction(set_to, 2, value=8),
        _instruction(move, 9, 7),
        _instruction(0x67, 9, value=4),  # times the size of a word
        _instruction(0x0F, 9, 6),
        _instruction(load_64, 3, 9, offset=_HEAD.size),
        _instruction(0x85, value=_PROBE_READ_KERNEL),
        _instruction(load_64, 1, 10, offset=found),
        _instruction(load_64, 2, 9, offset=_HEAD.size + 8),
        _instruction(add_to, 7, value=1),
    ]
    loop = [
        _instruction(0x3D, 7, 8, offset=1 + len(compare) + 1 + len(report)),  # to the end
        _instruction(0x35, 7, offset=len(compare) + 1 + len(report), value=MOST_WORDS),
        *compare,
        _instruction(0x1D, 1, 2, offset=-(2 + len(compare) + 1)),  # while they are equal
        *report,
    ]
    begin = [
        _instruction(0x62, 10, offset=key),
        _instruction(move, 2, 10),
        _instruction(add_to, 2, value=key),
        *_map(words_fd),
        _instruction(0x85, value=_LOOKUP),
        _instruction(0x15, 0, offset=5 + len(loop)),  # to the end
        _instruction(move, 6, 0),
        _instruction(set_to, 1, value=1),
        _instruction(0xDB, 6, 1, offset=8),  # one comparison more
        _instruction(set_to, 7),
        _instruction(load_64, 8, 6),
    ]
    return b"".join([*begin, *loop, _instruction(set_to, 0), _instruction(0x95)])


def _instruction(
    code: int, target: int = 0, source: int = 0, *, offset: int = 0, value: int = 0
) -> bytes:
    return struct.pack("=BBhi", code, target | source << 4, offset, value)


def _map(descriptor: int) -> tuple[bytes, bytes]:
    """Its address, to r1."""
    return _instruction(0x18, 1, 1, value=descriptor), _instruction(0)
