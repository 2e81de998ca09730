"""Keys and values of maps as plain objects, by the twins in bpf/abi.py.

With raw=True as bpftool prints them from type information; else addresses are text, and padding is
left out.
"""

import ctypes
from typing import Any

from bpf import abi, map_specs

_IS_PADDING = "pad"


def decode(kind: map_specs.CType, content: bytes, *, raw: bool = False) -> Any:
    """One key or value: an integer, a string, or a list or dictionary of these.

    Raises `ValueError` if the content is shorter than the type.
    """
    return _plain(kind.from_buffer_copy(content), raw)


def _plain(value: Any, raw: bool) -> Any:
    if isinstance(value, abi.CAddress) and not raw:
        return str(abi.unpack_address(bytes(value)))
    if isinstance(value, ctypes.Structure):
        return {
            name: _plain(getattr(value, name), raw)
            for name, *_ in value._fields_
            if raw or name != _IS_PADDING
        }
    if isinstance(value, ctypes.Array):
        return [_plain(element, raw) for element in value]
    if isinstance(value, bytes):  # an array of characters, up to the first 0
        return value.decode(errors="replace")
    return value.value if isinstance(value, ctypes._SimpleCData) else value
