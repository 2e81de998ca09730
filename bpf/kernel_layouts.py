"""Offsets of the kernel's structs, from its BTF, for programs that read its memory.

`struct sk_buff` shows gates where a checksum is pending; without it they trim the frame
(`src/frame.h`). A TCP socket shows the number of its first SYN (`src/connects.c`).
"""

import ctypes
import pathlib

from bpf import abi, btf, maps

_KEY = bytes(4)
_BUFFER = {name: ("sk_buff", name) for name, _ in abi.CBufferLayout._fields_}
_CONNECT = {"socket": ("bpf_sock_ops_kern", "sk"), "sequence": ("tcp_sock", "write_seq")}


def write_buffer(layouts: maps.Map, types: pathlib.Path = btf.VMLINUX) -> None:
    """Write the offsets of this kernel into the map, unless they are there. About 20 ms.

    types: the BTF. Raises `BtfError`, or `BpfError` for the map.
    """
    _write(layouts, abi.CBufferLayout, _BUFFER, types)


def write_connect(layouts: maps.Map, types: pathlib.Path = btf.VMLINUX) -> None:
    """The same for TCP sockets."""
    _write(layouts, abi.CConnectLayout, _CONNECT, types)


def _write(
    layouts: maps.Map,
    layout: type[ctypes.Structure],
    members: dict[str, tuple[str, str]],
    types: pathlib.Path,
) -> None:
    """members: struct and member, by field of the layout."""
    written = layouts.get(_KEY)
    if written is not None and any(written):
        return
    by_struct: dict[str, list[str]] = {}
    for struct, member in members.values():
        by_struct.setdefault(struct, []).append(member)
    found = btf.member_offsets(by_struct, types)
    offsets = {field: found[where] for field, where in members.items()}
    layouts.set(_KEY, bytes(layout(**offsets)))
