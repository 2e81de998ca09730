"""seccomp's user notifications: another process answers a process' system calls.

The filter is installed before the program starts, and stays. Each of a few calls waits for its
answer, which is an error, or that the kernel is to continue: so a fault begins and ends while the
program runs, which a filter that answers by itself cannot do. Linux 5.5.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import pathlib
import struct
from collections.abc import Sequence

from tests.faults import system_calls

# linux/seccomp.h, linux/filter.h, linux/prctl.h
_SECCOMP = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
_PIDFD_GETFD = 438
_SET_MODE_FILTER = 1
_NEW_LISTENER = 1 << 3
_RET_USER_NOTIF, _RET_ALLOW = 0x7FC00000, 0x7FFF0000
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # of struct seccomp_data
_NOTIF = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
_RESPONSE = struct.Struct("=QqiI")  # struct seccomp_notif_resp
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_SET_FLAGS = 0x40082104
_SYNC_WAKE_UP = 1  # Linux 6.6: the one who waits runs next, on the same processor
_CONTINUE = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A system call that waits for its answer. thread: its id."""

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]


def install(numbers: Sequence[int]) -> None:
    """Have calls of these numbers wait for answers, in this thread and all that it starts.

    To be called by a process with one thread, which has `listener_of` a descriptor from then on.
    Raises `OSError`.
    """
    program = _filter(numbers)
    instructions = ctypes.create_string_buffer(program, len(program))
    made = _Program(len(program) // 8, ctypes.cast(instructions, ctypes.c_void_p))
    if _libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(made)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def _filter(numbers: Sequence[int]) -> bytes:
    """Calls of another architecture, of which there are none, pass."""

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    compared = [
        instruction(_JUMP_IF_EQUAL, number, len(numbers) - index)
        for index, number in enumerate(numbers)
    ]
    return b"".join(
        (
            instruction(_LOAD_WORD, _ARCHITECTURE_AT),
            instruction(_JUMP_IF_EQUAL, system_calls.AUDIT_ARCHITECTURE, 1),
            instruction(_RETURN, _RET_ALLOW),
            instruction(_LOAD_WORD, _NUMBER_AT),
            *compared,
            instruction(_RETURN, _RET_ALLOW),
            instruction(_RETURN, _RET_USER_NOTIF),
        )
    )


def listener_of(pid: int) -> int | None:
    """A copy of the descriptor by which the calls of a process are answered, once it has installed
    its filter. The process itself could not send it: its calls wait. Raises `OSError`."""
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "seccomp notify" not in os.readlink(entry):
                continue
            return copy_descriptor(pid, int(entry.name))
    return None


def copy_descriptor(pid: int, number: int) -> int:
    """A copy of another process' descriptor. Raises `OSError`."""
    pidfd = os.pidfd_open(pid)
    try:
        copy = int(_libc.syscall(_PIDFD_GETFD, pidfd, number, 0))
        if copy < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"pidfd_getfd: {os.strerror(error)}")
        return copy
    finally:
        os.close(pidfd)


def wake_at_once(listener: int) -> None:
    """Answers cost a third less, where the kernel can."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(listener, _SET_FLAGS, _SYNC_WAKE_UP)


def receive(listener: int) -> Call | None:
    """The next call; None if it has ended meanwhile."""
    buffer = bytearray(_NOTIF.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer, True)
    except (FileNotFoundError, InterruptedError):
        return None
    identifier, thread, _, number, _, _, *arguments = _NOTIF.unpack(buffer)
    return Call(identifier, thread, number, tuple(arguments))


def answer(listener: int, call: Call, error: int | None) -> None:
    """Let the call fail with this error; None: let the kernel do it."""
    response = _RESPONSE.pack(call.id, 0, -(error or 0), 0 if error else _CONTINUE)
    with contextlib.suppress(FileNotFoundError):  # a signal has ended it
        fcntl.ioctl(listener, _SEND, bytearray(response), True)
