"""Events of listeners that open and close in chosen network namespaces, by sock_ops.

Hints, not facts: an event comes a moment before what it tells of, events are lost when the ring is
full (counted), and listeners from before `watch` report only when adopted, and not at all before
Linux 6.12. The link is not pinned: nobody hears the events of an agent that is gone, and its
sockets should not pay for them.
"""

import ctypes
import dataclasses
import hashlib
import os
import pathlib
import shutil
import struct
from collections.abc import Callable

from bpf import abi, compiling, maps, pins, ringbuffer, sources, syscalls

PROGRAM = "watch_listeners"
ITERATOR = "bpf_iter__tcp"
"""Pinned only where the kernel takes it: Linux 5.9, and 6.12 for it to be of any use."""

_MAX_WATCHED = 4096
_RING_BYTES = 65536
_HASH, _ARRAY, _RINGBUF = 1, 2, 27

WATCHED = abi.MapSpec("watched_netns", _HASH, 8, 4, _MAX_WATCHED)
LOSSES = abi.MapSpec("listener_losses", _ARRAY, 4, 8, 1)
EVENTS = abi.MapSpec("listener_events", _RINGBUF, 0, 0, _RING_BYTES)
ADOPTED = abi.MapSpec("listeners_adopted", _ARRAY, 4, 8, 1)
MAPS = (WATCHED, LOSSES, EVENTS, ADOPTED)
PINS = (PROGRAM, *(spec.name for spec in MAPS))

_BPF_CGROUP_SOCK_OPS = 3
_BPF_TRACE_ITER = 28


class CListenerEvent(ctypes.Structure):
    """`struct listener_event`."""

    _fields_ = (
        ("netns_cookie", ctypes.c_uint64),
        ("at_ns", ctypes.c_uint64),
        ("port", ctypes.c_uint32),
        ("is_open", ctypes.c_uint32),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ListenerChange:
    """A listener is about to open or close. `at_ns`: CLOCK_MONOTONIC."""

    netns_cookie: int
    at_ns: int
    port: int
    is_open: bool


class ListenerEvents:
    """The attached program. One reader."""

    def __init__(self, directory: pathlib.Path, cgroup: str | os.PathLike[str]) -> None:
        """Open the pins in `directory` and attach to `cgroup` and all below it.

        Raises `PinError` or `BpfError`; then nothing is attached.
        """
        self._watched = maps.Map.open(str(directory / WATCHED.name), WATCHED)
        self._losses = maps.Map.open(str(directory / LOSSES.name), LOSSES)
        self._events = maps.Map.open(str(directory / EVENTS.name), EVENTS)
        # What an earlier agent watched is not what this one does.
        for key, _ in list(self._watched.items()):
            self._watched.delete(key)
        self._ring = ringbuffer.RingBuffer(self._events.fd, _RING_BYTES)
        program = syscalls.open_pin(str(directory / PROGRAM))
        target = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._link = _link_create(program, target)
        finally:
            os.close(target)
            os.close(program)
        for _ in self._ring.records():
            pass
        self._losses_before = self._lost()

    def __enter__(self) -> "ListenerEvents":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach."""
        os.close(self._link)
        self._ring.close()
        for opened in (self._watched, self._losses, self._events):
            opened.close()

    def fileno(self) -> int:
        """Readable when there are hints."""
        return self._events.fd

    def watch(self, netns_cookie: int) -> None:
        """Hear of listeners that open from now on. Raises `BpfError` (E2BIG: 4096 already)."""
        self._watched.set(struct.pack("=Q", netns_cookie), struct.pack("=I", 1))

    def forget(self, netns_cookie: int) -> None:
        self._watched.delete(struct.pack("=Q", netns_cookie))

    def read(self) -> list[ListenerChange]:
        """All hints that have come."""
        found = [CListenerEvent.from_buffer_copy(record) for record in self._ring.records()]
        return [
            ListenerChange(event.netns_cookie, event.at_ns, event.port, bool(event.is_open))
            for event in found
        ]

    def lost(self) -> int:
        """How many events the ring had no room for, since this was made."""
        return self._lost() - self._losses_before

    def _lost(self) -> int:
        return _first(self._losses)


def adopt(directory: pathlib.Path, enter: Callable[[Callable[[], int]], int]) -> int:
    """Have the listeners of one network namespace report that are older than `watch`.

    enter: calls what it gets inside of that namespace. How many report now, whether or not they did
    before; 0 where the kernel offers no way. Takes 2 ms and more, so not for an event loop, and one
    at a time. Raises what `enter` raises, and `BpfError`.
    """
    if not os.path.lexists(directory / ITERATOR):
        return 0
    with maps.Map.open(str(directory / ADOPTED.name), ADOPTED) as adopted:
        before = _first(adopted)
        with pins.opened(directory / ITERATOR) as program:
            attributes = struct.pack("=IIII", program, 0, _BPF_TRACE_ITER, 0)
            what = "listing sockets"
            link, _ = syscalls.call(syscalls.Command.LINK_CREATE, attributes, what=what)
        try:
            # Which namespace it is about is settled here.
            attributes = struct.pack("=II", link, 0)
            create = syscalls.Command.ITER_CREATE
            sockets = enter(lambda: syscalls.call(create, attributes, what=what)[0])
        finally:
            os.close(link)
        with open(sockets, "rb", buffering=0) as stream:
            while stream.read(4096):
                pass
        return _first(adopted) - before


async def load(installation: pins.Pins) -> pathlib.Path:
    """Make sure that the current program is pinned; where it is. Raises `CompileError`.

    Compiled only when the source has changed; those of other sources are removed.
    """
    text = sources.expand("listeners.c").encode()
    directory = installation.schema / f"listeners-{hashlib.sha256(text).hexdigest()[:16]}"
    for other in installation.schema.glob("listeners-*"):
        if not other.name.startswith(directory.name):
            unpin(other)
    if not compiling.are_pinned(directory, PINS):
        await compiling.run("bpf.listener_compiler", str(directory), what="listeners.c")
    return directory


def unpin(directory: pathlib.Path) -> None:
    """Remove a directory of pins; what is open or attached stays until it is closed."""
    shutil.rmtree(directory)


def _first(counts: maps.Map) -> int:
    value = counts.get(struct.pack("=I", 0))
    return int(struct.unpack("=Q", value)[0]) if value else 0


def _link_create(program_fd: int, cgroup_fd: int) -> int:
    attributes = struct.pack("=IIII", program_fd, cgroup_fd, _BPF_CGROUP_SOCK_OPS, 0)
    what = "attaching to the root cgroup"
    return syscalls.call(syscalls.Command.LINK_CREATE, attributes, what=what)[0]
