"""The clock of verdicts, for those that give them and those that use them."""

import time


def boot_clock_ns() -> int:
    """Nanoseconds since the boot: no step of the wall clock moves it, and it includes suspends."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
