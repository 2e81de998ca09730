"""Decoding of reports from an agent of another version: as much of them as both know."""

import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

_EPOCH = "1970-01-01T00:00:00Z"
_SCALARS: dict[type[inspect.Type], type] = {
    inspect.StrType: str,
    inspect.BoolType: bool,
    inspect.IntType: int,
}


def decode(content: bytes, kind: type[T]) -> T:
    """A document as `kind`. Fields that are unknown here are ignored; those that are missing, or
    have another type than here, become empty: "", 0, False, [], {}, or the start of 1970.

    Raises `msgspec.DecodeError` if it is no JSON.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        completed = _completed(msgspec.json.decode(content), inspect.type_info(kind))
        return msgspec.convert(completed, kind)


def _completed(value: Any, kind: inspect.Type) -> Any:
    match kind:
        case inspect.StructType():
            given = _of_type(value, dict)
            return {
                field.encode_name: _completed(given.get(field.encode_name), field.type)
                for field in kind.fields
                if field.required or field.encode_name in given
            }
        case inspect.UnionType():
            if value is None and kind.includes_none:
                return None
            (first, *_) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
            return _completed(value, first)
        case inspect.ListType() | inspect.VarTupleType():
            return [_completed(each, kind.item_type) for each in _of_type(value, list)]
        case inspect.TupleType():
            padded = [*_of_type(value, list), *[None] * len(kind.item_types)]
            return [_completed(*pair) for pair in zip(padded, kind.item_types, strict=False)]
        case inspect.DictType():
            given = _of_type(value, dict)
            return {key: _completed(each, kind.value_type) for key, each in given.items()}
        case inspect.DateTimeType():
            return value if _is_time(value) else _EPOCH
        case inspect.FloatType():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return value if is_number else 0.0
    scalar = _SCALARS.get(type(kind))
    return _of_type(value, scalar) if scalar else value


def _of_type(value: Any, kind: type) -> Any:
    """The value, or an empty one of that type. A bool is no int."""
    return value if type(value) is kind else kind()


def _is_time(value: Any) -> bool:
    try:
        msgspec.convert(value, datetime.datetime)
    except msgspec.ValidationError:
        return False
    return True
