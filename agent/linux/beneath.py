"""Files below a directory that no name and no symbolic link leads out of."""

import ctypes
import errno
import os
import pathlib
import stat
from typing import Final

# The same number on all architectures (Linux 5.6, fs/open.c); glibc has no wrapper.
_OPENAT2: Final = 437
# linux/openat2.h
_NO_MAGICLINKS: Final = 0x02
_NO_SYMLINKS: Final = 0x04
_BENEATH: Final = 0x08

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_directory(root: pathlib.Path, *names: str) -> int:
    """A descriptor of a directory: each name is below the one before, and the first below the root.
    None may lead out of that, or be a symbolic link. Raises OSError."""
    found = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        above = found
        try:
            found = _open(above, name, os.O_RDONLY | os.O_DIRECTORY, _BENEATH | _NO_SYMLINKS)
        finally:
            os.close(above)
    return found


def read_file(directory: int, name: str, max_bytes: int) -> bytes:
    """The content of a regular file. Symbolic links may lead anywhere below the directory: kubelets
    and CSI drivers replace `..data`. Raises OSError, also for a longer file."""
    # A FIFO must not block.
    descriptor = _open(directory, name, os.O_RDONLY | os.O_NONBLOCK, _BENEATH | _NO_MAGICLINKS)
    try:
        # open() raises for a directory, and leaves its descriptor open.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes")
    return content


def _open(above: int, name: str, flags: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    found: int = _libc.syscall(
        _OPENAT2, above, os.fsencode(name), ctypes.byref(how), ctypes.sizeof(how)
    )
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
