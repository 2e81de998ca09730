"""The programs by which made frames reach the gate's own one (gate_runs.py), as instructions."""

import struct
import zlib

from bpf import syscalls
from tests.kernel import assembly, foreign
from tests.model.facts import Sent, Stamp

MARK = 0x6D6F6465
"""By which the stage knows our frames. The kernel has reports of its own to send (MLD)."""

PROG_ARRAY = 3
"""The type of the map by which `launcher` and `stage` call a program."""

# struct __sk_buff
CONTEXT_BYTES = 192
MARK_AT = 8
PRIORITY, INGRESS, IFINDEX, TC_INDEX, CB = 32, 36, 40, 44, 48
_GSO_SEGMENTS, _GSO_SIZE = 164, 176

# The map `order`: what the stage puts in the place of the next packet.
ORDER = struct.Struct("=II2040s")
FRAME_AT = 8
# The map `result`: packets that the stage changed, those that passed the gate, and the last stamp.
RESULT = struct.Struct("=IIII")

SHORTEST_RUN = 60
"""Bytes; test runs reject shorter frames, so the program cuts them."""

STAMPS = {
    Stamp.NONE: (0, 0, 0, 1, 0x0F, 0x7020, 0x7080, 0xF060, 0x3060),
    Stamp.PLAIN: (0x7060, 0x7060, 0x7062, 0x706A, 0x707F),
    Stamp.UNPROVEN: (0x7061,),
    Stamp.HAND_MADE: (0x7040, 0x7040, 0x7041, 0x7047, 0x7048, 0x705F),
    Stamp.RULE: (0x7067,),
    Stamp.PROBE: (0x7068,),
    Stamp.UNIDENTIFIED: (0x7069,),
}
STAMP_OF = {value: stamp for stamp, values in STAMPS.items() for value in values}


def number_of(stamp: Stamp, frame: bytes) -> int:
    """One of those that mean this stamp, the same for the same frame."""
    numbers = STAMPS[stamp]
    return numbers[zlib.crc32(frame) % len(numbers)]


def run_frame(launcher_fd: int, sent: Sent, ifindex: int, clone_to: int = 0) -> int:
    """Run the program that `launcher` calls on a frame that leaves by `ifindex`, or send a clone of
    it out by `clone_to`. Returns what the program did. Raises `BpfError`."""
    context = bytearray(CONTEXT_BYTES)
    switch = number_of(sent.switch_stamp, sent.frame) << 16
    struct.pack_into("=III", context, PRIORITY, switch, sent.ingress, ifindex)
    struct.pack_into("=I", context, MARK_AT, MARK)
    length = len(sent.frame)
    struct.pack_into(
        "=4I",
        *(context, CB, number_of(sent.stamp, sent.frame), sent.is_tagged),
        *(length if length < SHORTEST_RUN else 0, clone_to),
    )
    if sent.has_segments:
        is_by_number = length % 2
        struct.pack_into("=I", context, _GSO_SEGMENTS, 2 if is_by_number else 0)
        struct.pack_into("=I", context, _GSO_SIZE, 0 if is_by_number else 100)
    frame = sent.frame.ljust(SHORTEST_RUN, b"\0")
    return syscalls.run_program(launcher_fd, frame, bytes(context))[0]


def launcher(calls: int) -> bytes:
    """Sets the stamp, a VLAN tag and the length of a test frame by the context's `cb`, and sends a
    clone out by an interface, or calls the gate."""
    a = assembly
    return b"".join(
        (
            a.copy(6, 1),
            a.load(2, 6, CB),
            a.store(6, TC_INDEX, 2),
            a.load(3, 6, CB + 4),
            a.unless_zero(3, a.copy(1, 6), a.move(2, 0x0081), a.call(a.VLAN_PUSH)),
            a.load(2, 6, CB + 8),
            a.unless_zero(2, a.copy(1, 6), a.move(3, 0), a.call(a.CHANGE_TAIL)),
            a.load(2, 6, CB + 12),
            a.unless_zero(
                2, a.copy(1, 6), a.move(3, 0), a.call(a.CLONE_REDIRECT), a.move(0, 0), a.leave()
            ),
            a.copy(1, 6),
            a.load_map(2, calls),
            a.move(3, 0),
            a.call(a.TAIL_CALL),
            a.move(0, -100),
            a.leave(),
        )
    )


def _value_of(map_fd: int) -> bytes:
    """r0: the map's only value."""
    a = assembly
    return b"".join(
        (
            a.move(2, 0),
            a.store(10, -4, 2),
            a.load_map(1, map_fd),
            a.copy(2, 10),
            a.add(2, -4),
            a.call(a.MAP_LOOKUP),
        )
    )


def _drop_without(register: int) -> bytes:
    a = assembly
    return b"".join((a.skip_unless_zero(register, 2), a.move(0, foreign.TC_ACT_SHOT), a.leave()))


def stage(calls: int, order: int, result: int) -> bytes:
    """Puts the ordered frame in a packet's place, and calls the gate."""
    a = assembly
    change = (
        a.load(2, 9, 0),  # changed packets
        a.add(2, 1),
        a.store(9, 0, 2),
        a.copy(1, 6),
        a.copy(2, 8),
        a.move(3, 0),
        a.call(a.CHANGE_TAIL),
        a.store(9, 12, 0),
        a.unless_zero(0, a.move(0, foreign.TC_ACT_SHOT), a.leave()),
        a.copy(1, 6),
        a.move(2, 0),
        a.copy(3, 7),
        a.add(3, FRAME_AT),
        a.copy(4, 8),
        a.move(5, 0),
        a.call(a.STORE_BYTES),
        a.load(2, 7, 4),
        a.store(6, TC_INDEX, 2),
    )
    return b"".join(
        (
            a.copy(6, 1),
            a.load(2, 6, MARK_AT),
            a.unless_equal(2, MARK, a.move(0, foreign.TC_ACT_SHOT), a.leave()),
            _value_of(order),
            _drop_without(0),
            a.copy(7, 0),
            _value_of(result),
            _drop_without(0),
            a.copy(9, 0),
            a.load(8, 7, 0),
            a.unless_zero(8, a.unless_above(8, ORDER.size - FRAME_AT, *change)),
            a.copy(1, 6),
            a.load_map(2, calls),
            a.move(3, 0),
            a.call(a.TAIL_CALL),
            a.move(0, foreign.TC_ACT_SHOT),
            a.leave(),
        )
    )


def witness(result: int) -> bytes:
    """Behind the gate: counts what passed, keeps its stamp, and drops it."""
    a = assembly
    return b"".join(
        (
            a.copy(6, 1),
            _value_of(result),
            _drop_without(0),
            a.load(2, 0, 4),
            a.add(2, 1),
            a.store(0, 4, 2),
            a.load(2, 6, TC_INDEX),
            a.store(0, 8, 2),
            a.move(0, foreign.TC_ACT_SHOT),
            a.leave(),
        )
    )


def reentry(order: int, ifindex: int) -> bytes:
    """Stamps our frames that come in, and sends a clone, which has no socket, out by the pod's
    interface. The kernel takes the socket away in IP only."""
    a = assembly
    return b"".join(
        (
            a.copy(6, 1),
            a.load(2, 6, MARK_AT),
            a.unless_equal(2, MARK, a.move(0, foreign.TC_ACT_UNSPEC), a.leave()),
            _value_of(order),
            _drop_without(0),
            a.load(2, 0, 4),
            a.store(6, TC_INDEX, 2),
            a.copy(1, 6),
            a.move(2, ifindex),
            a.move(3, 0),
            a.call(a.CLONE_REDIRECT),
            a.move(0, foreign.TC_ACT_SHOT),
            a.leave(),
        )
    )
