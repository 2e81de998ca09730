"""The C sources as one text, and the hash that identifies the loaded programs.

bcc rewrites map accesses in the main file only, not in included ones, so quoted includes are
expanded here; #line keeps file and line in the compiler's messages.
"""

import functools
import hashlib
import pathlib
import re

_HERE = pathlib.Path(__file__).parent
SOURCE_DIRECTORY = _HERE / "src"
# BCC_KERNEL_SOURCE: bcc looks for include/linux/kconfig.h below it.
KERNEL_SOURCE = _HERE / "include"

_INCLUDE = re.compile(r'#include "(?P<name>[^"]+)"')


def expand(name: str) -> str:
    """`src/<name>` with each quoted include replaced, once, by its text."""
    return "".join(_expand(name, set()))


def _expand(name: str, seen: set[str]) -> list[str]:
    if name in seen:
        return []
    seen.add(name)
    lines = [f'#line 1 "{name}"\n']
    text = (SOURCE_DIRECTORY / name).read_text(encoding="ascii")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if include := _INCLUDE.match(line):
            lines += _expand(include["name"], seen)
            lines.append(f'#line {number + 1} "{name}"\n')
        else:
            lines.append(line)
    return lines


@functools.cache
def fingerprint() -> str:
    """16 hexadecimal digits over all sources and stand-in headers, which are read once.

    A process' programs are of the sources that it has read first; and the 80 files cannot be read
    while it has no descriptor left.
    """
    digest = hashlib.sha256()
    for directory in (SOURCE_DIRECTORY, KERNEL_SOURCE):
        for path in sorted(directory.rglob("*.[ch]")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(_HERE)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:16]
