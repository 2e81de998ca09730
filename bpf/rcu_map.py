"""A hash map whose values can be replaced while programs read them: a reader sees no mix of two.

An update of a hash map replaces the element, but the kernel reuses the old element at once, for the
next key that is written, and an interrupted program may still read it. So a write that could get
such an element first waits for all running programs.
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
# Unavailable where CPUs run without ticks (nohz_full); then wait several times as long.
_INSTEAD_SECONDS = 0.1
_libc = ctypes.CDLL(None, use_errno=True)


class RcuMap:
    """A hash map with one writer. Rewriting an unchanged value costs no wait."""

    def __init__(self, table: maps.Map) -> None:
        self._table = table
        # A previous writer may have replaced a value.
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
        """Delete a key that programs no longer look up."""
        self._table.delete(key)


def wait_for_programs() -> None:
    """Return when every program that runs now has ended: 10 to 20 ms, or 100."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None or _libc.syscall(number, _GLOBAL, 0, 0) != 0:
        time.sleep(_INSTEAD_SECONDS)
