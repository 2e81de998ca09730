"""Lookups of listeners in any network namespace, many in one system call.

They show whether a connection would find a listener with room in its queue. They do not see what
is between the two: rules, a proxy, a lost address.
"""

import contextlib
import ctypes
import ipaddress
import os
import pathlib
import socket
from collections.abc import Iterator, Sequence

from bpf import btf, errors, pinning, pins, syscalls
from bpf.program_sets import ProgramSet, ProgramSpec

PROGRAM = "look_up_listeners"
_SOURCE = "listener_lookup.c"
_SCHED_CLS = 3  # `enum bpf_prog_type`

# Separate from the gates' programs: a kernel that rejects it can have gates.
PROGRAM_SET = ProgramSet(
    source=_SOURCE,
    programs=(ProgramSpec(PROGRAM, PROGRAM, _SCHED_CLS),),
    maps=(),
    needs="Linux 5.8 with type information, and no lockdown for confidentiality",
)

_QUERIES_MAX = 96
OWN_NETNS = 0xFFFFFFFF
"""The id of the calling process's own network namespace (BPF_F_CURRENT_NETNS)."""
_SO_NETNS_COOKIE = 71  # asm-generic/socket.h, Linux 5.14
_TRIAL_SECONDS = 5.0  # the loopback takes microseconds

# `enum listener_state`
_NO_LISTENER, HAS_ROOM, QUEUE_FULL = 1, 2, 3
_ONLY_ROOM = bytes(int(state == HAS_ROOM) for state in range(256))


class CListenerQuery(ctypes.Structure):
    """`struct listener_query`."""

    _fields_ = (
        ("netns_cookie", ctypes.c_uint64),
        ("netns_id", ctypes.c_uint32),
        ("port", ctypes.c_uint16),
        ("family", ctypes.c_uint8),
        ("state", ctypes.c_uint8),
        ("address", ctypes.c_uint8 * 16),
    )


class CSocketLayout(ctypes.Structure):
    """`struct socket_layout`."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            *("net", "net_cookie", "filter", "reuseport", "reuseport_members"),
            *("accept_queue", "accept_queue_max", "pending"),
        )
    )


class CListenerQueries(ctypes.Structure):
    """`struct listener_queries`, and the longest list that may follow it."""

    _fields_ = (
        ("ethernet_header", ctypes.c_uint8 * 14),
        ("next", ctypes.c_uint16),
        ("layout", CSocketLayout),
        ("queries", CListenerQuery * _QUERIES_MAX),
    )


_HEADER_BYTES = CListenerQueries.queries.offset
_QUERY_BYTES = ctypes.sizeof(CListenerQuery)
_STATE = CListenerQuery.state.offset


def query(netns_cookie: int, netns_id: int, address: str, port: int) -> bytes:
    """One query, for `ListenerLookup`. netns_cookie: of SO_NETNS_COOKIE; netns_id: of RTM_GETNSID,
    or `OWN_NETNS`. Raises ValueError for what is no address."""
    to = ipaddress.ip_address(address)
    family = socket.AF_INET if to.version == 4 else socket.AF_INET6
    made = CListenerQuery(netns_cookie, netns_id, socket.htons(port), family)
    made.address[: len(to.packed)] = to.packed
    return bytes(made)


class ListenerLookup:
    """The loaded program. For one thread at a time."""

    def __init__(self, directory: pathlib.Path) -> None:
        """Open its pin. Takes 20 ms for the kernel's type information. Raises `BpfError`."""
        self._queries = CListenerQueries(layout=_layout())
        self._header = bytes(self._queries)[:_HEADER_BYTES]
        self._program = syscalls.open_pin(str(directory / PROGRAM))

    def close(self) -> None:
        os.close(self._program)

    def look_up(self, queries: Sequence[bytes]) -> bytes:
        """One byte for each query: 1 where a connection would find a listener with room, else 0.

        Takes 5 us, and 0.4 us for each query; a system call for each 96.
        """
        if len(queries) <= _QUERIES_MAX:
            return self.states(queries).translate(_ONLY_ROOM)
        parts = range(0, len(queries), _QUERIES_MAX)
        return b"".join(self.look_up(queries[at : at + _QUERIES_MAX]) for at in parts)

    def states(self, queries: Sequence[bytes]) -> bytes:
        """One `enum listener_state` for each of 96 queries at most, 0 after an interruption."""
        frame = self._header + b"".join(queries)
        ctypes.memmove(ctypes.addressof(self._queries), frame, len(frame))
        with contextlib.suppress(errors.BpfError):  # a signal, or no memory
            syscalls.run_program_in_place(self._program, self._queries, len(frame), len(queries))
        return ctypes.string_at(ctypes.addressof(self._queries), len(frame))[
            _HEADER_BYTES + _STATE :: _QUERY_BYTES
        ]

    def try_out(self) -> None:
        """Look up listeners of this process. Raises `BpfError` unless each state is as it should
        be, as where a kernel's structs are not what its type information shows."""
        with _listening() as (listener, own):
            cookie = listener.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
            found = query(int.from_bytes(cookie, "little"), OWN_NETNS, *own)
            states = [*self.states([found])]
            with socket.create_connection(own, _TRIAL_SECONDS):
                states += self.states([found])
        states += self.states([found])
        if states != [HAS_ROOM, QUEUE_FULL, _NO_LISTENER]:
            raise errors.BpfError(0, f"looking up own listeners gives {states}")


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """A listener whose queue is full after one connection."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        yield listener, listener.getsockname()


async def load(installation: pins.Pins) -> pathlib.Path:
    """Ensure that the current program is pinned. Returns its directory. Raises `CompileError`."""
    return await pinning.ensure_only(PROGRAM_SET, installation.schema, "listener-lookup")


def _layout() -> CSocketLayout:
    """Raises `BtfError`."""
    at = btf.member_offsets(
        {
            "sock_common": ["skc_net"],
            "net": ["net_cookie"],
            "sock": ["sk_filter", "sk_reuseport_cb", "sk_ack_backlog", "sk_max_ack_backlog"],
            "sock_reuseport": ["num_socks"],
            "inet_connection_sock": ["icsk_accept_queue"],
            "request_sock_queue": ["qlen"],
        }
    )
    queue = at["inet_connection_sock", "icsk_accept_queue"]
    return CSocketLayout(
        net=at["sock_common", "skc_net"],
        net_cookie=at["net", "net_cookie"],
        filter=at["sock", "sk_filter"],
        reuseport=at["sock", "sk_reuseport_cb"],
        reuseport_members=at["sock_reuseport", "num_socks"],
        accept_queue=at["sock", "sk_ack_backlog"],
        accept_queue_max=at["sock", "sk_max_ack_backlog"],
        pending=queue + at["request_sock_queue", "qlen"],
    )
