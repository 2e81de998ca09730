"""Calls of sockets that fail, as they do while the machine has no memory."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.relay.control import ControlSocket

_ERRORS = (errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)
_CALLS = ("recv", "send", "sendmsg")


@contextlib.contextmanager
def of_calls(monkeypatch: pytest.MonkeyPatch, *, times: int) -> Iterator[None]:
    """The first calls of each kind fail, of ends of a relay's socket pair."""
    with monkeypatch.context() as patched:
        for name in _CALLS:
            call = getattr(socket.socket, name)
            patched.setattr(socket.socket, name, _failing(call, times), raising=False)
        yield


def _failing(call: Callable[..., Any], times: int) -> Callable[..., Any]:
    left = list(_ERRORS[:times])

    def fail(sock: socket.socket, *arguments: Any) -> Any:
        if left and isinstance(sock, ControlSocket):
            number = left.pop()
            raise OSError(number, os.strerror(number))
        return call(sock, *arguments)

    return fail
