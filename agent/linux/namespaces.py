"""Network and mount namespaces: unshare(2), mount(2) and umount2(2)."""

import ctypes
import os
import pathlib
import threading
from collections.abc import Callable
from typing import TypeVar

from probes.netns import CLONE_NEWNET, close_own_netns

T = TypeVar("T")

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_network() -> None:
    """Move the calling thread to a new network namespace. Raises `OSError`."""
    _check(_libc.unshare(CLONE_NEWNET), "cannot create a network namespace")
    close_own_netns()


def unshare_network_and_mounts() -> None:
    """Move the process to new network and mount namespaces, whose mounts stay in them.

    To be called before the process has other threads. Raises `OSError` (EPERM: not root).
    """
    _check(_libc.unshare(_CLONE_NEWNS | CLONE_NEWNET), "cannot create namespaces")
    close_own_netns()
    flags = _MS_REC | _MS_PRIVATE
    _check(_libc.mount(b"none", b"/", None, flags, None), "cannot make mounts private")


def in_new_network(run: Callable[[], T]) -> T:
    """Call `run` in a thread of its own, in a new network namespace, and return its result.

    The namespace exists as long as a socket, a mount or a process uses it. Raises `OSError`.
    """
    results: list[T | Exception] = []

    def work() -> None:
        try:
            unshare_network()
            results.append(run())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, name="new-netns")
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result


def mount(kind: str, path: pathlib.Path) -> None:
    """Mount a new file system of this kind. Raises `OSError`."""
    result = _libc.mount(kind.encode(), os.fsencode(path), kind.encode(), 0, None)
    _check(result, f"cannot mount {kind} at {path}")


def mount_own_netns(path: pathlib.Path) -> None:
    """Bind the calling thread's network namespace to a file, which names it. Raises `OSError`."""
    source = b"/proc/thread-self/ns/net"
    result = _libc.mount(source, os.fsencode(path), None, _MS_BIND, None)
    _check(result, f"cannot bind a network namespace to {path}")


def unmount(path: str) -> None:
    """Raises `OSError`."""
    _check(_libc.umount2(os.fsencode(path), _MNT_DETACH), f"cannot unmount {path}")


def _check(result: int, failure: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{failure} ({os.strerror(number)})")
