"""Listener events: listeners that open and close in watched network namespaces, by sock_ops.

Events are hints: an event comes a moment before the change, and events are lost when the ring is
full (counted). Listeners from before `watch` report only when adopted: by themselves since Linux
6.12, else by a tracepoint. No link is pinned: without an agent no process reads the events, and
sockets should not pay for them.
"""

import ctypes
import dataclasses
import os
import pathlib
import struct
from collections.abc import Callable, Mapping

from bpf import map_specs, maps, pinning, pins, ringbuffer, syscalls
from bpf.program_sets import ProgramSet, ProgramSpec

PROGRAM = "watch_listeners"
ITERATOR = "bpf_iter__tcp"
"""Pinned only where the kernel accepts it: Linux 5.9, and 6.12 for it to be useful."""
CLOSES = "watch_listener_closes"
"""Pinned only where the kernel accepts it: Linux 5.12, with type information."""

_MAX_WATCHED = 4096
_MAX_SOCKETS = 4096
_RING_BYTES = 65536
_HASH, _ARRAY, _RINGBUF = 1, 2, 27

WATCHED = map_specs.MapSpec("watched_netns", _HASH, map_specs.U64, map_specs.U32, _MAX_WATCHED)
LOSSES = map_specs.MapSpec("listener_losses", _ARRAY, map_specs.U32, map_specs.U64, 1)
EVENTS = map_specs.MapSpec("listener_events", _RINGBUF, None, None, _RING_BYTES)
ADOPTED = map_specs.MapSpec("listeners_adopted", _ARRAY, map_specs.U32, map_specs.U64, 1)


class CWatchedSocket(ctypes.Structure):
    """`struct watched_socket`."""

    _fields_ = (
        ("netns_cookie", ctypes.c_uint64),
        ("port", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


SOCKETS = map_specs.MapSpec("watched_sockets", _HASH, map_specs.U64, CWatchedSocket, _MAX_SOCKETS)
MAPS = (WATCHED, LOSSES, EVENTS, ADOPTED, SOCKETS)

_SOCK_OPS, _TRACING = 13, 26  # `enum bpf_prog_type`
_BPF_CGROUP_SOCK_OPS = 3
_BPF_TRACE_RAW_TP, _BPF_TRACE_ITER = 23, 28

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
        ProgramSpec(
            *(CLOSES, CLOSES, _TRACING, _BPF_TRACE_RAW_TP),
            is_optional=True,
            tracepoint="inet_sock_set_state",
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
        self._sockets = maps.Map.open(str(directory / SOCKETS.name), SOCKETS)
        self._adopted: dict[int, set[bytes]] = {}
        """Keys of the map of sockets, by namespace; those closed since are no longer in the map."""
        self._closes: int | None = None
        self._directory = directory
        # Entries of a previous agent.
        for entries in (self._watched, self._sockets):
            for key, _ in list(entries.items()):
                entries.delete(key)
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
        if self._closes is not None:
            os.close(self._closes)
            self._closes = None
        self._ring.close()
        for opened in (self._watched, self._losses, self._events, self._sockets):
            opened.close()

    def fileno(self) -> int:
        """Readable when there are hints."""
        return self._events.fd

    def watch(self, netns_cookie: int) -> None:
        """Report listeners that open from now on. Raises `BpfError` (E2BIG: 4096 already)."""
        self._watched.set(struct.pack("=Q", netns_cookie), struct.pack("=I", 1))

    def forget(self, netns_cookie: int) -> None:
        self._watched.delete(struct.pack("=Q", netns_cookie))
        for key in self._adopted.pop(netns_cookie, ()):
            self._sockets.delete(key)
        self._detach_if_idle()

    def adopt(self, netns_cookie: int, listening: Mapping[int, int]) -> int:
        """Report when these existing listeners close, by the tracepoint; returns their number.

        listening: cookies (SO_COOKIE) and ports. For kernels where `adopt` of this module returns
        0; returns 0 where the kernel has no such tracepoint either. The program is attached until
        none of them is left, and costs each TCP connection of the node 0.2 us. Takes 0.1 ms and
        2 us for each listener. Raises `BpfError` (E2BIG: 4096 already; those before it report).
        """
        if not listening:
            return 0
        if self._closes is None:
            if not os.path.lexists(self._directory / CLOSES):
                return 0
            with pins.opened(self._directory / CLOSES) as program:
                self._closes = syscalls.raw_tracepoint_open(program, "")
        keys = self._adopted.setdefault(netns_cookie, set())
        for cookie, port in listening.items():
            key = struct.pack("=Q", cookie)
            self._sockets.set(key, bytes(CWatchedSocket(netns_cookie, port)))
            keys.add(key)
        return len(listening)

    def read(self) -> list[ListenerChange]:
        """All events since the last call."""
        found = [CListenerEvent.from_buffer_copy(record) for record in self._ring.records()]
        if any(not event.is_open for event in found):
            self._detach_if_idle()
        return [
            ListenerChange(event.netns_cookie, event.at_ns, event.port, bool(event.is_open))
            for event in found
        ]

    def lost(self) -> int:
        """Number of events lost because the ring was full, since this object was created."""
        return self._lost() - self._losses_before

    def _detach_if_idle(self) -> None:
        """The program removes each listener that it has reported."""
        if self._closes is not None and next(self._sockets.items(), None) is None:
            os.close(self._closes)
            self._closes = None
            self._adopted.clear()

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
    return await pinning.ensure_only(PROGRAM_SET, installation.schema, "listeners")


def _first(counts: maps.Map) -> int:
    value = counts.get(struct.pack("=I", 0))
    return int(struct.unpack("=Q", value)[0]) if value else 0


def _link_create(program_fd: int, cgroup_fd: int) -> int:
    attributes = struct.pack("=IIII", program_fd, cgroup_fd, _BPF_CGROUP_SOCK_OPS, 0)
    what = "attaching to the root cgroup"
    return syscalls.call(syscalls.Command.LINK_CREATE, attributes, what=what)[0]
