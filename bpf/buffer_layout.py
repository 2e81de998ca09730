"""The layout of the kernel's `struct sk_buff`, which shows gates where a checksum is pending.

Gates read it where tc programs may read the kernel's memory and the kernel has BTF; otherwise they
trim the frame (`src/frame.h`).
"""

import pathlib

from bpf import abi, btf, maps

_KEY = bytes(4)
_STRUCT = "sk_buff"


def write(layouts: maps.Map, types: pathlib.Path = btf.VMLINUX) -> None:
    """Write the offsets of this kernel into the map, unless they are there. About 20 ms.

    types: the BTF. Raises `BtfError`, or `BpfError` for the map.
    """
    written = layouts.get(_KEY)
    if written is not None and any(written):
        return
    members = [name for name, _ in abi.CBufferLayout._fields_]
    found = btf.member_offsets({_STRUCT: members}, types)
    offsets = {name: found[_STRUCT, name] for name in members}
    layouts.set(_KEY, bytes(abi.CBufferLayout(**offsets)))
