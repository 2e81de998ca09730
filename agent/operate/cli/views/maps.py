"""Output of `podgate maps`."""

import pathlib
from collections.abc import Sequence
from typing import Any

import click

from agent.operate.cli.output import Column, Screen, Signal
from agent.operate.pinned.bpftool import Bpftool
from agent.operate.pinned.maps import MapContent, MapEntry, MapStatus

# Of hashes: an LRU map that is full forgets its oldest entries by design.
_NEARLY_FULL = 0.9


def _fill(status: MapStatus) -> str:
    return "" if status.used is None else f"{status.used / status.capacity:.0%}"


def _is_nearly_full(status: MapStatus) -> Signal | None:
    is_limited = status.type in ("hash", "percpu_hash", "hash_of_maps")
    is_full = (status.used or 0) >= _NEARLY_FULL * status.capacity
    return Signal.CAUTION if is_limited and is_full else None


_MAPS: tuple[Column[MapStatus], ...] = (
    Column("MAP", lambda one: one.name),
    Column("TYPE", lambda one: one.type),
    Column("USED", lambda one: one.used),
    Column("CAPACITY", lambda one: one.capacity),
    Column("FILL", _fill, signal=_is_nearly_full),
    Column("KIB", lambda one: -(-one.memory_bytes // 1024)),
    Column("TYPES", lambda one: "BTF" if one.has_types else None, is_wide=True),
    Column("PATH", lambda one: one.path, is_wide=True),
)

_ENTRIES: tuple[Column[MapEntry], ...] = (
    Column("KEY", lambda entry: in_words(entry.key)),
    Column("VALUE", lambda entry: _value(entry)),
)


def show(maps: Sequence[MapStatus], screen: Screen) -> None:
    """Print the maps as a table."""
    screen.table(_MAPS, maps)
    total = sum(one.memory_bytes for one in maps) / (1 << 20)
    screen.line(f"{len(maps)} maps, {total:.1f} MiB; 'podgate maps NAME' shows entries")


def show_entries(content: MapContent, screen: Screen) -> None:
    """Print the entries of a map."""
    if content.entries:
        screen.table(_ENTRIES, content.entries)
    else:
        screen.line(f"{content.name} has no entries")
    if content.empty:
        screen.line(f"{content.empty} empty entries are left out")


def show_raw(paths: Sequence[pathlib.Path], *, is_dump: bool) -> None:
    """Print what bpftool prints of these maps, and its commands. Raises `BpftoolError`."""
    tool = Bpftool()
    for path in paths:
        output = tool.text("map", "dump" if is_dump else "show", "pinned", str(path))
        click.echo(f"# {tool.commands[-1]}\n{output}", nl=not output.endswith("\n"))


def in_words(value: Any) -> str:
    """A decoded key or value in one line: "mode=2 addresses=[198.18.1.1]"."""
    if isinstance(value, dict):
        return " ".join(f"{name}={_nested(each)}" for name, each in value.items())
    return _nested(value)


def _nested(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{in_words(value)}}}"
    if isinstance(value, list):
        return f"[{' '.join(map(_nested, _shortened(value)))}]"
    return str(value)


def _shortened(values: list[Any]) -> list[Any]:
    """Without the zeros at the end."""
    length = len(values)
    while length and not any(_leaves(values[length - 1])):
        length -= 1
    return values[:length]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [] if value == "::" else [value]


def _value(entry: MapEntry) -> str:
    if not entry.values:
        return in_words(entry.value)
    shown = (
        f"cpu{number}: {in_words(value)}"
        for number, value in enumerate(entry.values)
        if any(_leaves(value))
    )
    return "; ".join(shown) or "0"
