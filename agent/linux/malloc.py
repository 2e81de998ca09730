"""The C library's allocator: fewer pages that nothing uses."""

import ctypes

# malloc.h of glibc.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Its default, 128 KiB.
_MMAP_THRESHOLD_BYTES = 128 << 10


def keep_little() -> None:
    """Use one arena, and give large blocks back when they are freed. Call it before threads start.

    Otherwise each thread has an arena of its own, in which what it freed stays: 24 MB in an agent
    that has read the kernel's types and loaded its programs in threads. And the limit from which a
    block has pages of its own grows with the largest one that was freed, up to 32 MiB (mallopt(3)).
    Other C libraries have no such settings.
    """
    libc = ctypes.CDLL(None)
    if mallopt := getattr(libc, "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def give_back() -> None:
    """Return pages that nothing uses any more to the system, between used ones, too.

    For the end of a start: what a process read and compiled to import its modules leaves 1 to 4 MB.
    """
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)
