"""The pinned maps, opened for reading: nothing is created, locked or changed."""

import contextlib
import errno
import os
from collections.abc import Iterator

from agent.errors import PodgateError
from bpf import abi, errors, loader, pins


class PinsUnreadableError(PodgateError):
    """There are no pinned objects that this version can read; one sentence."""


@contextlib.contextmanager
def opened(installation: pins.Pins) -> Iterator[loader.Loaded]:
    """The maps, for the duration of the block. Raises `PinsUnreadableError`, also in the block."""
    find_schema(installation)
    try:
        loaded = loader.open_maps(installation)
        try:
            yield loaded
        finally:
            loaded.close()
    except errors.PinError as error:
        raise PinsUnreadableError(
            f"the maps below {installation.maps} are of another version of podgate ({error})"
        ) from error
    except errors.BpfError as error:
        raise PinsUnreadableError(
            f"the maps below {installation.maps} cannot be read ({error.strerror or error})"
        ) from error
    except ValueError as error:
        raise PinsUnreadableError(
            f"the maps below {installation.maps} have a value that this version does not know "
            f"({error}); use the podgate command of the version that wrote it."
        ) from error


def find_schema(installation: pins.Pins) -> None:
    """Raise `PinsUnreadableError` unless this version's objects are pinned."""
    try:
        is_there = bool(os.listdir(installation.maps))
    except FileNotFoundError:
        is_there = False
    except PermissionError:
        raise PinsUnreadableError(
            f"{installation.root} belongs to root; run the command as root."
        ) from None
    except OSError as error:
        raise PinsUnreadableError(
            f"{installation.maps} cannot be read ({os.strerror(error.errno or errno.EIO)})."
        ) from error
    if is_there:
        return
    if others := installation.other_schemas():
        names = ", ".join(path.name for path in others)
        raise PinsUnreadableError(
            f"{installation.root} has objects of another version of podgate (schema {names}; this "
            f"one reads v{abi.SCHEMA}); use the podgate command of that version."
        )
    raise PinsUnreadableError(
        f"nothing is pinned below {installation.root}: no pod of this node has a gate."
    )
