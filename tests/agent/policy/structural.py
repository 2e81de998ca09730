"""What an API server does with an object by its structural schema, in small.

Nulls and unknown fields go, defaults come, and the rest is judged
(k8s.io/apiextensions-apiserver/pkg/apiserver/schema). Rules in CEL are given as functions. A
keyword that is not known here is an error, so that no schema depends on an unchecked one.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
Rules = Mapping[str, Callable[[Any], bool]]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
}
_SAYS_NOTHING = {"description", "default", "x-kubernetes-list-type", "x-kubernetes-map-type"}


class SchemaError(Exception):
    """The API server would reject the object; the message has the field and the reason."""


def stored(schema: Json, given: Any, rules: Rules) -> Any:
    """The object as it would be stored. Raises `SchemaError`."""
    made = copy.deepcopy(given)
    _complete(schema, made)
    _validate(schema, made, rules, "")
    return made


def _complete(schema: Json, value: Any) -> None:
    """Prune, and fill in defaults."""
    properties = schema.get("properties", {})
    if isinstance(value, dict) and "additionalProperties" not in schema:
        for name in list(value):
            is_kept = name in properties or schema.get("x-kubernetes-preserve-unknown-fields")
            if not is_kept or (name in properties and value[name] is None):
                del value[name]
        for name, one in properties.items():
            if "default" in one:
                value.setdefault(name, copy.deepcopy(one["default"]))
            if name in value:
                _complete(one, value[name])
    elif isinstance(value, list):
        for item in value:
            _complete(schema.get("items", {}), item)


def _validate(schema: Json, value: Any, rules: Rules, where: str) -> None:
    for keyword, asked in schema.items():
        if keyword == "properties":
            for name, one in asked.items():
                if isinstance(value, dict) and name in value:
                    _validate(one, value[name], rules, f"{where}.{name}")
        elif keyword == "additionalProperties":
            for name, one in value.items():
                _validate(asked, one, rules, f"{where}.{name}")
        elif keyword == "items":
            for index, one in enumerate(value):
                _validate(asked, one, rules, f"{where}[{index}]")
        elif keyword == "x-kubernetes-validations":
            for rule in asked:
                if not rules[rule["rule"]](value):
                    raise SchemaError(f"{where}: {rule['message']}")
        elif not _holds(keyword, asked, value, rules, where):
            raise SchemaError(f"{where}: {keyword} {asked}, and it is {value!r}")


def _holds(keyword: str, asked: Any, value: Any, rules: Rules, where: str) -> bool:
    match keyword:
        case "type":
            return isinstance(value, _TYPES[asked]) and not isinstance(value, bool)
        case "required":
            return all(name in value for name in asked)
        case "minItems" | "minProperties":
            return bool(len(value) >= asked)
        case "maxItems" | "maxProperties":
            return bool(len(value) <= asked)
        case "minimum":
            return not isinstance(value, int) or value >= asked
        case "maximum":
            return not isinstance(value, int) or value <= asked
        case "pattern":
            return not isinstance(value, str) or re.search(asked, value) is not None
        case "enum":
            return value in asked
        case "anyOf":
            return _count(asked, value, rules, where) >= 1
        case "oneOf":
            return _count(asked, value, rules, where) == 1
        case "x-kubernetes-int-or-string":
            return isinstance(value, int | str) and not isinstance(value, bool)
        case "x-kubernetes-preserve-unknown-fields":
            return True
    assert keyword in _SAYS_NOTHING, f"{where}: keyword {keyword} is not known"
    return True


def _count(schemas: list[Json], value: Any, rules: Rules, where: str) -> int:
    """How many of them take the value."""
    found = 0
    for one in schemas:
        try:
            _validate(one, value, rules, where)
        except SchemaError:
            continue
        found += 1
    return found
