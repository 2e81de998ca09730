"""Files that keep what the agent knows for the next one. All of this blocks: for threads."""

import os
import pathlib
import threading


def replace(path: pathlib.Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace a file in one step, with its directory if need be. Raises `OSError`.

    A power cut may lose it: what these files hold is true for one boot, or asked for again.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    unfinished.rename(path)


class StateFile:
    """One that several threads replace, of which an older never undoes what a newer one wrote."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._written = 0

    def write(self, number: int, content: bytes) -> None:
        """number: grows with each content. Raises `OSError`."""
        with self._lock:
            if number >= self._written:
                self._written = number
                replace(self.path, content)
