"""Records in a file, one line each, which is replaced by a new one when it is large."""

import errno
import os
import pathlib
import stat
from collections.abc import Sequence

import msgspec

from agent.flows.records import Record

# Pod and process names of the node: for its administrators and log collectors.
_MODE = 0o640
# Longer than any line.
_TAIL_BYTES = 1 << 20


class FlowFile:
    """Appends whole lines or nothing: a write for which there is no room is taken back.

    Full files are renamed to PATH.1, PATH.2 and so on, the oldest is deleted. A file that another
    program renames or deletes is made again. Methods raise `OSError` and block.
    """

    def __init__(self, path: pathlib.Path, *, max_bytes: int, files: int) -> None:
        """files: that are kept, with the current one."""
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._descriptor: int | None = None

    def send(self, records: Sequence[Record]) -> None:
        lines = b"".join(msgspec.json.encode(one) + b"\n" for one in records)
        descriptor = self._open()
        size = os.fstat(descriptor).st_size
        if size and size + len(lines) > self._max_bytes:
            self._rotate()
            descriptor, size = self._open(), 0
        try:
            written = os.write(descriptor, lines)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        if written < len(lines):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        """The file of this path, whichever it is by now."""
        if self._descriptor is not None:
            if self._is_current(self._descriptor):
                return self._descriptor
            self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A FIFO without a reader would block; a link may lead to any file of the node.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, _MODE)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(self._path))
            _remove_half_line(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        """`_open` closes the file that is renamed."""
        numbered = [self._path] + [
            self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._files)
        ]
        for target, source in reversed(list(zip(numbered[1:], numbered[:-1], strict=True))):
            if source.exists():
                source.rename(target)
        if len(numbered) == 1:
            self._path.unlink()


def _remove_half_line(descriptor: int) -> None:
    """Of an agent that was killed."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _TAIL_BYTES)
    tail = os.pread(descriptor, size - start, start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(descriptor, start + tail.rfind(b"\n") + 1)
