"""Whether anything is hooked into the way of packets by the loopback of a network namespace:
netfilter (rules of iptables and nft), programs of tc and XDP, programs that choose sockets.

The kernel keeps pointers to these in `struct net` and in the loopback's `struct net_device`; each
is 0 while there are none. The kernel sends no message to another namespace when one appears, but
can compare the words (`bpf.memory_watch`). Tried on Linux 6.18: rules added to a chain that exists
change no word, so a namespace with any hook shows nothing by them.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Mapping

from bpf import btf, errors, pinning, syscalls
from bpf.program_sets import ProgramSet, ProgramSpec

PROGRAM = "find_packet_hooks"
_SCHED_CLS = 3  # `enum bpf_prog_type`

PROGRAM_SET = ProgramSet(
    source="packet_hooks.c",
    programs=(ProgramSpec(PROGRAM, PROGRAM, _SCHED_CLS),),
    maps=(),
    needs="Linux 5.11 with type information, and no lockdown for confidentiality",
)

_WORDS_MAX = 16
_WORD_BYTES = 8
# `enum nf_inet_hooks` without NF_INET_FORWARD: what comes by the loopback is not forwarded.
_NETFILTER_HOOKS = (0, 1, 3, 4)
_STARTED = 1  # `enum netdev_state_t`: __LINK_STATE_START, as a bit
_SK_LOOKUP = 1  # `enum netns_bpf_attach_type`
# Of the loopback; a kernel has some of them: tcx since 6.6 (e420bed02507), egress of netfilter
# since 5.16 (42df6e1d221d).
_LOOPBACK_MEMBERS = (
    *("tcx_ingress", "tcx_egress", "miniq_ingress", "miniq_egress"),
    *("nf_hooks_ingress", "nf_hooks_egress", "xdp_prog"),
)


class CHookOffsets(ctypes.Structure):
    """`struct hook_offsets`."""

    _fields_ = (
        ("nsproxy", ctypes.c_uint32),
        ("net", ctypes.c_uint32),
        ("loopback", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("words", ctypes.c_uint32 * _WORDS_MAX),
    )


class CHookWords(ctypes.Structure):
    """`struct hook_words`."""

    _fields_ = (
        ("ethernet_header", ctypes.c_uint8 * 14),
        ("netns_words", ctypes.c_uint8),
        ("count", ctypes.c_uint8),
        ("offsets", CHookOffsets),
        ("used", ctypes.c_uint32),
        ("netns", ctypes.c_uint64),
        ("loopback", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Unhooked:
    """A network namespace in which nothing is hooked.

    address, loopback: of its structs in the kernel's memory; state: of its loopback.
    """

    address: int
    loopback: int
    state: int


class PacketHooks:
    """The loaded program. For one thread at a time."""

    def __init__(self, loaded: Mapping[str, int]) -> None:
        """loaded: of `load`, owned from now on. Takes 20 ms for the kernel's type information.
        Raises `BpfError`."""
        self._program = loaded[PROGRAM]
        try:
            self._request = _request()
        except errors.BpfError:
            self.close()
            raise
        self._found = CHookWords.from_buffer_copy(self._request)

    def close(self) -> None:
        os.close(self._program)

    def find_unhooked(self) -> Unhooked | None:
        """The calling thread's namespace, unless something is hooked there, or its loopback is
        down. Raises `BpfError`.

        Takes 6 us.
        """
        found = self._found
        ctypes.memmove(ctypes.addressof(found), self._request, len(self._request))
        # Until the program writes it: a signal may come before.
        found.used = 1
        syscalls.run_program_in_place(self._program, found, len(self._request), 1)
        if found.used or not found.netns or not found.state & _STARTED:
            return None
        return Unhooked(found.netns, found.loopback, found.state)

    def words(self, netns: Unhooked) -> dict[int, int]:
        """What changes in the kernel's memory when something is hooked there, or the loopback is
        set down: present values by address, in 64 bits each."""
        words = {
            (netns.address if number < self._found.netns_words else netns.loopback) + offset: 0
            for number, offset in enumerate(self._found.offsets.words[: self._found.count])
        }
        words[netns.loopback + self._found.offsets.state] = netns.state
        return words


async def load() -> PacketHooks:
    """Load the program; pins nothing. Raises `CompileError` where it cannot be compiled or the
    kernel rejects it (no CAP_PERFMON, lockdown for confidentiality), and `BpfError`."""
    loaded = await pinning.load_unpinned(PROGRAM_SET)
    return await asyncio.to_thread(PacketHooks, loaded)


def _request() -> bytes:
    """A frame without the answer. Raises `BtfError`."""
    at = btf.member_offsets(
        {
            "task_struct": ["nsproxy"],
            "nsproxy": ["net_ns"],
            "net": ["loopback_dev", "nf", "bpf"],
            "netns_nf": ["hooks_ipv4", "hooks_ipv6"],
            "netns_bpf": ["run_array"],
            "net_device": ["state"],
        }
    )
    netfilter = at["net", "nf"]
    words = [
        netfilter + at["netns_nf", member] + hook * _WORD_BYTES
        for member in ("hooks_ipv4", "hooks_ipv6")
        for hook in _NETFILTER_HOOKS
    ]
    words.append(at["net", "bpf"] + at["netns_bpf", "run_array"] + _SK_LOOKUP * _WORD_BYTES)
    request = CHookWords(netns_words=len(words))
    for member in _LOOPBACK_MEMBERS:
        with contextlib.suppress(btf.BtfError):
            words.append(btf.member_offsets({"net_device": [member]})["net_device", member])
    request.count = len(words)
    request.offsets = CHookOffsets(
        *(at["task_struct", "nsproxy"], at["nsproxy", "net_ns"], at["net", "loopback_dev"]),
        at["net_device", "state"],
    )
    request.offsets.words[: len(words)] = words
    return bytes(request)
