"""Waiting until no program reads memory that is about to be written."""

import ctypes
import platform
import time

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


def wait_for_programs() -> None:
    """Return when every program that runs now has ended: 10 to 20 ms, or 100."""
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None or _libc.syscall(number, _GLOBAL, 0, 0) != 0:
        time.sleep(_INSTEAD_SECONDS)
