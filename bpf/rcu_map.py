"""Values that programs read while they are replaced: each reader sees one of them, never a mix.

An update of a hash map puts a new element in the old one's place, but the kernel hands the old one
out again at once, for whichever key is written next, and a program that was interrupted may still
be reading it. So before a write that could get such an element, all programs are waited for.
"""

import ctypes
import platform
import time

from bpf import maps

# membarrier(2), MEMBARRIER_CMD_GLOBAL: returns after an RCU grace period, and so after every
# program that was running; 10 to 20 ms.
_SYSCALL_NUMBERS = {
    "x86_64": 324,
    "aarch64": 283,
    "riscv64": 283,
    "loongarch64": 283,
    "s390x": 356,
    "ppc64le": 365,
}
_GLOBAL = 1
# Refused where CPUs run without ticks (nohz_full); then several times what it would have taken.
_INSTEAD_SECONDS = 0.1
_libc = ctypes.CDLL(None, use_errno=True)


class RcuMap:
    """A hash map with one writer. Rewriting what is there already is free."""

    def __init__(self, table: maps.Map) -> None:
        self._table = table
        # Of a writer before this one nothing is known.
        self._was_replaced = True

    def set(self, key: bytes, value: bytes) -> None:
        """Insert or replace as a whole. Raises `BpfError` (E2BIG: the map is full)."""
        before = self._table.get(key)
        if before == value:
            return
        if self._was_replaced:
            wait_for_programs()
        self._table.set(key, value)
        self._was_replaced = before is not None

    def delete(self, key: bytes) -> None:
        """To be called when no program asks for this key any more."""
        self._table.delete(key)


def wait_for_programs() -> None:
    """Return when every program that runs now has ended: 10 to 20 ms, or 100."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None or _libc.syscall(number, _GLOBAL, 0, 0) != 0:
        time.sleep(_INSTEAD_SECONDS)
