"""Listener events: listeners that open and close in watched network namespaces, by sock_ops.

Events are hints: an event comes a moment before the change, events are lost when the ring is full
(counted), and listeners from before `watch` report only when adopted, and not at all before Linux
6.12. The link is not pinned: without an agent no process reads the events, and the pods' sockets
should not pay for them.
"""

import ctypes
import dataclasses
import hashlib
import os
import pathlib
import shutil
import struct
from collections.abc import Callable

from bpf import abi, maps, pinning, pins, ringbuffer, sources, syscalls
from bpf.program_sets import ProgramSet, ProgramSpec

PROGRAM = "watch_listeners"
ITERATOR = "bpf_iter__tcp"
"""Pinned only where the kernel accepts it: Linux 5.9, and 6.12 for it to be useful."""

_MAX_WATCHED = 4096
_RING_BYTES = 65536
_HASH, _ARRAY, _RINGBUF = 1, 2, 27

WATCHED = abi.MapSpec("watched_netns", _HASH, abi.U64, abi.U32, _MAX_WATCHED)
LOSSES = abi.MapSpec("listener_losses", _ARRAY, abi.U32, abi.U64, 1)
EVENTS = abi.MapSpec("listener_events", _RINGBUF, None, None, _RING_BYTES)
ADOPTED = abi.MapSpec("listeners_adopted", _ARRAY, abi.U32, abi.U64, 1)
MAPS = (WATCHED, LOSSES, EVENTS, ADOPTED)

_SOCK_OPS, _TRACING = 13, 26  # `enum bpf_prog_type`
_BPF_CGROUP_SOCK_OPS = 3
_BPF_TRACE_ITER = 28

# Separate from the gates' programs: a kernel that rejects this one (before 5.15) can have gates.
PROGRAM_SET = ProgramSet(
    source="listeners.c",
    programs=(
        ProgramSpec(PROGRAM, PROGRAM, _SOCK_OPS, _BPF_CGROUP_SOCK_OPS),
        ProgramSpec(
            *(ITERATOR, ITERATOR, _TRACING, _BPF_TRACE_ITER),
            is_optional=True,
            kernel_function="bpf_iter_tcp",
        ),
    ),
    maps=MAPS,
    needs="Linux 5.15",
)


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
    """The attached program and its events. One reader."""

    def __init__(self, directory: pathlib.Path, cgroup: str | os.PathLike[str]) -> None:
        """Open the pins in `directory` and attach to `cgroup` and all below it.

        Raises `PinError` or `BpfError`; then nothing is attached.
        """
        self._watched = maps.Map.open(str(directory / WATCHED.name), WATCHED)
        self._losses = maps.Map.open(str(directory / LOSSES.name), LOSSES)
        self._events = maps.Map.open(str(directory / EVENTS.name), EVENTS)
        # Entries of a previous agent.
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
        """Report listeners that open from now on. Raises `BpfError` (E2BIG: 4096 already)."""
        self._watched.set(struct.pack("=Q", netns_cookie), struct.pack("=I", 1))

    def forget(self, netns_cookie: int) -> None:
        self._watched.delete(struct.pack("=Q", netns_cookie))

    def read(self) -> list[ListenerChange]:
        """All events since the last call."""
        found = [CListenerEvent.from_buffer_copy(record) for record in self._ring.records()]
        return [
            ListenerChange(event.netns_cookie, event.at_ns, event.port, bool(event.is_open))
            for event in found
        ]

    def lost(self) -> int:
        """Number of events lost because the ring was full, since this object was created."""
        return self._lost() - self._losses_before

    def _lost(self) -> int:
        return _first(self._losses)


def adopt(directory: pathlib.Path, enter: Callable[[Callable[[], int]], int]) -> int:
    """Make the existing listeners of one network namespace report. Returns their number.

    enter: calls its argument inside that namespace. Returns 0 where the kernel cannot do it. Takes
    2 ms or more, so not for an event loop, and one call at a time. Raises the errors of `enter`,
    and `BpfError`.
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
            # This call fixes the namespace that the iterator reads.
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
    """Ensure that the current program is pinned. Returns its directory. Raises `CompileError`.

    Loads only if the source has changed; removes programs of other sources.
    """
    text = sources.expand("listeners.c").encode()
    directory = installation.schema / f"listeners-{hashlib.sha256(text).hexdigest()[:16]}"
    for other in installation.schema.glob("listeners-*"):
        if not other.name.startswith(directory.name):
            unpin(other)
    await pinning.ensure_pinned(PROGRAM_SET, directory)
    return directory


def unpin(directory: pathlib.Path) -> None:
    """Remove a directory of pins; open or attached objects live until they are closed."""
    shutil.rmtree(directory)


def _first(counts: maps.Map) -> int:
    value = counts.get(struct.pack("=I", 0))
    return int(struct.unpack("=Q", value)[0]) if value else 0


def _link_create(program_fd: int, cgroup_fd: int) -> int:
    attributes = struct.pack("=IIII", program_fd, cgroup_fd, _BPF_CGROUP_SOCK_OPS, 0)
    what = "attaching to the root cgroup"
    return syscalls.call(syscalls.Command.LINK_CREATE, attributes, what=what)[0]
