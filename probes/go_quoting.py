"""Go's %q: how its errors quote what a server sent."""

import re

QUOTED_MAX_BYTES = 1024
"""Maximum of quoted bytes; Go has no limit. Enough to recognise them in an Event."""

_ITEMS_MAX = 32

_PLAIN = re.compile(rb"[ !#-\[\]-~]*")
_ESCAPES = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F)},
    **{code: f"\\x{code - 0xDC00:02x}" for code in range(0xDC80, 0xDD00)},  # not UTF-8
    **dict(zip(b'\a\b\f\n\r\t\v"\\', (rf"\{letter}" for letter in 'abfnrtv"\\'), strict=True)),
}


def quoted(data: bytes) -> str:
    """`data` in double quotes as by strconv.Quote; longer data ends with `...`."""
    rest = "..." if len(data) > QUOTED_MAX_BYTES else ""
    data = data[:QUOTED_MAX_BYTES]
    if _PLAIN.fullmatch(data):
        return f'"{data.decode("ascii")}"{rest}'
    text = data.decode("utf-8", "surrogateescape")
    return f'"{"".join(map(_character, text))}"{rest}'


def quoted_list(items: list[bytes]) -> str:
    """Several as Go writes a slice: `["a" "b"]`; a long list ends with `...`."""
    rest = " ..." if len(items) > _ITEMS_MAX else ""
    return f"[{' '.join(quoted(item) for item in items[:_ITEMS_MAX])}{rest}]"


def _character(character: str) -> str:
    code = ord(character)
    if code in _ESCAPES:
        return _ESCAPES[code]
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
