"""Changes of files in a directory.

Events of the file system are hints only: the whole directory is to be read again after each, so
renames, atomic symlink swaps (ConfigMaps) and lost events are all the same.
"""

import pathlib
from collections.abc import AsyncIterator

import watchfiles

# Editors write in several steps; an immediate read would report a half-written file as invalid.
_SETTLE_MS = 50


async def follow(
    directory: pathlib.Path, *, at_least_every_seconds: float | None = None
) -> AsyncIterator[None]:
    """One item whenever something changes in the directory, until cancelled.

    at_least_every_seconds: one item after so long without any change, too.
    """
    async for _ in watchfiles.awatch(
        directory,
        debounce=_SETTLE_MS,
        step=_SETTLE_MS,
        recursive=False,
        rust_timeout=int((at_least_every_seconds or 5) * 1000),
        yield_on_timeout=at_least_every_seconds is not None,
    ):
        yield
