"""A network namespace for this process alone, which ends with it."""

import ctypes
import os

from probes.netns import CLONE_NEWNET, forget_home

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_network() -> None:
    """Move the calling thread, the process's only one, to a new namespace. Raises `OSError`."""
    if _libc.unshare(CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a network namespace cannot be made ({os.strerror(number)})")
    forget_home()
