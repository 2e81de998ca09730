"""Encodes a v1.Pod from the API server's JSON as protobuf, as Go's v1.Pod#Marshal() does.

`pod_fields` has the fields. Those of later releases are left out.
"""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from agent.api.podinfo import pod_fields
from probes.protocols import protobuf


def encode(kind: str, value: Mapping[str, Any]) -> bytes:
    """kind: "Pod", or a message in it; value: decoded JSON. Unknown fields, nulls and values of
    another type are left out."""
    return _message(kind, value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """kind: of the value, each value or each map's value; is_inline: JSON has the fields of this
    message in the one around it."""

    number: int
    kind: str
    is_repeated: bool
    is_map: bool
    is_inline: bool


_Fields = Mapping[str, _Field]


@functools.cache
def _schema() -> Mapping[str, _Fields]:
    found: dict[str, dict[str, _Field]] = {}
    fields: dict[str, _Field] = {}
    for line in pod_fields.SCHEMA.strip().splitlines():
        words = line.split()
        if not line.startswith(" "):
            fields = found.setdefault(words.pop(0), {})
        for word in words:
            name, _, rest = word.partition("=")
            number, _, kind = rest.partition(":")
            fields[name] = _Field(
                int(number),
                kind.strip("*+{}") or "string",
                is_repeated=kind.startswith("*"),
                is_map=kind.startswith("{"),
                is_inline=kind.startswith("+"),
            )
    return found


@functools.cache
def _inlined(kind: str) -> tuple[_Field, ...]:
    return tuple(field for field in _schema()[kind].values() if field.is_inline)


def _message(kind: str, values: Any) -> bytes:
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind} is no object")
    encoded = bytearray()
    for field in _inlined(kind):
        if content := _message(field.kind, values):
            encoded += protobuf.delimited(field.number, content)
    fields = _schema()[kind]
    for name, value in values.items():
        field_of = fields.get(name)
        if field_of is not None and value is not None and not field_of.is_inline:
            encoded += _field(field_of, value)
    return bytes(encoded)


def _field(field: _Field, value: Any) -> bytes:
    if field.is_map:
        entries = value.items() if isinstance(value, Mapping) else ()
        return b"".join(_map_entry(field, key, one) for key, one in entries)
    if field.is_repeated:
        values = value if isinstance(value, list | tuple) else ()
        return b"".join(_value(field.number, field.kind, one) for one in values)
    return _value(field.number, field.kind, value)


def _map_entry(field: _Field, key: Any, value: Any) -> bytes:
    return protobuf.delimited(field.number, _value(1, "string", key) + _value(2, field.kind, value))


def _value(number: int, kind: str, value: Any) -> bytes:
    """One value with its key; empty if it is of another type."""
    try:
        if kind in ("int", "bool"):
            return protobuf.varint(number << 3 | protobuf.VARINT) + protobuf.varint(_integer(value))
        encoder = _ENCODERS.get(kind)
        return protobuf.delimited(number, encoder(value) if encoder else _message(kind, value))
    except ValueError:
        return b""


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("no integer")
    return int(value)


def _string(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("no string")
    # Manifests may contain unpaired surrogates.
    return value.encode("utf-8", "replace")


def _time(value: Any) -> bytes:
    """metav1.Time: whole seconds."""
    moment = datetime.datetime.fromisoformat(_string(value).decode())
    return _value(1, "int", int(moment.timestamp()))


def _quantity(value: Any) -> bytes:
    """resource.Quantity: its text."""
    return _value(1, "string", str(value) if isinstance(value, int) else value)


def _int_or_string(value: Any) -> bytes:
    """intstr.IntOrString."""
    if isinstance(value, str):
        return _value(1, "int", 1) + _value(3, "string", value)
    return _value(1, "int", 0) + _value(2, "int", value)


_ENCODERS: Final[Mapping[str, Callable[[Any], bytes]]] = {
    "string": _string,
    "Time": _time,
    "Quantity": _quantity,
    "IntOrString": _int_or_string,
}
