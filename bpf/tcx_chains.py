"""The state of a namespace's tcx chains that have a link, in some system calls: whether anything
changed.

The kernel sends no message about tcx, and a query of each chain takes 2 us and RTNL. An iterator
over links (Linux 5.19, 9f8836127308) takes 0.25 us for each and no lock that others wait for. Its
program reads how often each link's chain was changed: `bpf_mprog_bundle.revision`, which counts
programs without links, too. That needs the kernel's BTF, and a kernel that is not in lockdown for
confidentiality.

Instead of reading all of that again and again, the kernel can compare the words that each change of
a chain changes (`bpf.memory_watch`).
"""

import os
import struct
from collections.abc import Iterator

from bpf import btf, syscalls

_FUNCTION = "bpf_iter_bpf_link"
_BPF_PROG_TYPE_TRACING, _BPF_TRACE_ITER = 26, 28
_SEQ_WRITE = 127  # bpf_seq_write, Linux 5.8
_INSTRUCTION = struct.Struct("=BBhi")  # struct bpf_insn
_UNSIGNED, _SIGNED = struct.Struct("=I"), struct.Struct("=i")
_READ_BYTES = 64 << 10
_OWN_NETNS = "/proc/thread-self/ns/net"
_OFFSETS = {
    "bpf_link": ("id", "type"),
    "tcx_link": ("dev",),
    "net_device": ("tcx_ingress", "tcx_egress", "nd_net"),
    "net": ("ns",),
    "ns_common": ("inum",),
    "bpf_mprog_entry": ("parent",),
    "bpf_mprog_bundle": ("revision",),
}
RECORD_BYTES = 64
"""Of a link, in the order of links, in 8 bytes each: its id and its interface's address; of both
chains (ingress, egress) the entry that is in force, its bundle's address, and its revision."""
_RECORD = struct.Struct("=8Q")
_CHAINS = ("tcx_ingress", "tcx_egress")
# Where they are on the program's stack, from its end.
_LINK_ID, _DEVICE, _FIRST_CHAIN, _CHAIN_BYTES = -64, -56, -48, 24


class TcxChains:
    """Reads it. Nothing is pinned. For one thread."""

    def __init__(self) -> None:
        """Of the calling thread's namespace. Raises `BpfError` where the kernel does not offer
        it."""
        self._at = btf.member_offsets(_OFFSETS)
        program_fd = syscalls.program_load(
            _BPF_PROG_TYPE_TRACING,
            _program(self._at, os.stat(_OWN_NETNS).st_ino),
            attach_type=_BPF_TRACE_ITER,
            name="tcx_chains",
            attach_btf_id=btf.function_id(_FUNCTION),
        )
        try:
            self._link_fd = syscalls.iterator_link(program_fd)
        finally:
            os.close(program_fd)

    def close(self) -> None:
        os.close(self._link_fd)

    def state(self) -> bytes:
        """Equal to an earlier one if and only if no chain with a link has changed since, and no
        link was made or detached. Raises `BpfError`."""
        stream_fd = syscalls.iterator_open(self._link_fd)
        try:
            parts = []
            while part := os.read(stream_fd, _READ_BYTES):
                parts.append(part)
        finally:
            os.close(stream_fd)
        return b"".join(parts)

    def words(self, state: bytes) -> dict[int, int]:
        """What each later change of a chain, or its removal, changes in the kernel's memory: values
        of this state, by address, in 64 bits each.

        A change replaces the interface's entry or, of a program in its place, the revision alone
        (`tcx_prog_attach` in kernel/bpf/tcx.c).
        """
        return dict(
            word
            for record in _RECORD.iter_unpack(state)
            for word in self._words_of(record[1], (record[2:5], record[5:8]))
        )

    def _words_of(
        self, device: int, chains: tuple[tuple[int, ...], ...]
    ) -> Iterator[tuple[int, int]]:
        for member, (entry, bundle, revision) in zip(_CHAINS, chains, strict=True):
            yield device + self._at["net_device", member], entry
            if bundle:
                yield bundle + self._at["bpf_mprog_bundle", "revision"], revision


def _program(at: dict[tuple[str, str], int], netns: int) -> bytes:
    """Writes a record for each link of tcx that is attached to an interface of this namespace; 0
    where there is no chain. at: offsets of `_OFFSETS`; netns: the namespace's inode.

    Loads by addresses that the verifier knows by their types are no calls, and load 0 where there
    is no memory. Raises `BtfError`.
    """
    load_32, load_64, store_64, move, set_to, jump_unless = 0x61, 0x79, 0x7B, 0xBF, 0xB7, 0x15
    end = [(set_to, 0, 0, 0), (0x95, 0, 0, 0)]
    chains = [(store_64, 10 | 8 << 4, _DEVICE, 0)]
    for number, member in enumerate(_CHAINS):
        to = _FIRST_CHAIN + number * _CHAIN_BYTES
        chains += [
            (load_64, 1 | 8 << 4, at["net_device", member], 0),
            (store_64, 10 | 1 << 4, to, 0),
            (load_64, 1 | 1 << 4, at["bpf_mprog_entry", "parent"], 0),
            (store_64, 10 | 1 << 4, to + 8, 0),
            (load_64, 1 | 1 << 4, at["bpf_mprog_bundle", "revision"], 0),
            (store_64, 10 | 1 << 4, to + 16, 0),
        ]
    write = [
        *chains,
        (load_64, 1 | 6 << 4, 0, 0),  # r1 = context->meta
        (load_64, 1 | 1 << 4, 0, 0),  # r1 = meta->seq
        (move, 2 | 10 << 4, 0, 0),
        (0x07, 2, 0, _LINK_ID),  # r2 = r10 + _LINK_ID
        (set_to, 3, 0, RECORD_BYTES),
        (0x85, 0, 0, _SEQ_WRITE),
    ]
    of_tcx = [
        (load_32, 1 | 7 << 4, at["bpf_link", "id"], 0),
        (store_64, 10 | 1 << 4, _LINK_ID, 0),
        (move, 1 | 7 << 4, 0, 0),
        (set_to, 2, 0, btf.struct_id("tcx_link")),
        (0x85, 2 << 4, 0, btf.function_id("bpf_rdonly_cast")),
        (load_64, 8 | 0 << 4, at["tcx_link", "dev"], 0),  # r8: none after it was detached
        (jump_unless, 8, len(write) + 3, 0),
        (load_64, 1 | 8 << 4, at["net_device", "nd_net"], 0),
        (load_32, 1 | 1 << 4, at["net", "ns"] + at["ns_common", "inum"], 0),
        (0x56, 1, len(write), _SIGNED.unpack(_UNSIGNED.pack(netns))[0]),  # of 32 bits, unless equal
    ]
    is_tcx = [
        (load_32, 1 | 7 << 4, at["bpf_link", "type"], 0),
        (0x55, 1, len(of_tcx) + len(write), syscalls.BPF_LINK_TYPE_TCX),  # unless it is equal
    ]
    begin = [
        (move, 6 | 1 << 4, 0, 0),  # r6 = context: struct bpf_iter__bpf_link
        (load_64, 7 | 6 << 4, 8, 0),  # r7 = its link; none at the end
        (jump_unless, 7, len(is_tcx) + len(of_tcx) + len(write), 0),
    ]
    made = [*begin, *is_tcx, *of_tcx, *write, *end]
    return b"".join(_INSTRUCTION.pack(*each) for each in made)
