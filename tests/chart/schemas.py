"""Validator of JSON against the parts of JSON Schema and OpenAPI 3 that the chart's values and the
Kubernetes API use. A keyword that is in neither is an error.
"""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_IGNORED = {"$schema", "title", "description", "default", "format", "discriminator"}
_KNOWN = {
    *("type", "properties", "additionalProperties", "required", "items", "enum", "pattern"),
    *("minimum", "minItems", "minLength", "allOf", "anyOf", "oneOf", "$ref", "nullable"),
}


class Schemas:
    """Schemas that may refer to each other by the last part of `$ref`."""

    def __init__(self, named: Json) -> None:
        self._named = named

    def problems(self, value: object, schema: Json, path: str = "") -> Iterator[str]:
        """One sentence for each violation, with its path."""
        keywords = {key for key in schema if not key.startswith("x-")}
        if unknown := keywords - _KNOWN - _IGNORED:
            raise NotImplementedError(f"{path}: the keywords {sorted(unknown)} are not supported")
        if reference := schema.get("$ref"):
            yield from self.problems(value, self._named[reference.rpartition("/")[2]], path)
        for part in schema.get("allOf", ()):
            yield from self.problems(value, part, path)
        choices = schema.get("oneOf", ())
        if choices and sum(not any(self.problems(value, one, path)) for one in choices) != 1:
            yield f"{path}: {value!r} is none of its types"
        if (some := schema.get("anyOf")) and all(
            any(self.problems(value, one, path)) for one in some
        ):
            yield f"{path}: {value!r} is none of its types"
        if "enum" in schema and value not in schema["enum"]:
            yield f"{path}: {value!r} is none of {schema['enum']}"
        if not _has_type(value, schema):
            yield f"{path}: {value!r} is no {schema['type']}"
        elif isinstance(value, dict):
            yield from self._of_object(value, schema, path)
        elif isinstance(value, list):
            if len(value) < schema.get("minItems", 0):
                yield f"{path}: has too few items"
            for index, one in enumerate(value):
                yield from self.problems(one, schema.get("items", {}), f"{path}[{index}]")
        elif isinstance(value, str):
            if not re.search(schema.get("pattern", ""), value):
                yield f"{path}: {value!r} does not match {schema['pattern']}"
        elif isinstance(value, int | float) and value < schema.get("minimum", value):
            yield f"{path}: {value} is less than {schema['minimum']}"

    def _of_object(self, value: Json, schema: Json, path: str) -> Iterator[str]:
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name}: is missing"
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, one in value.items():
            if name in known:
                yield from self.problems(one, known[name], f"{path}.{name}")
            elif isinstance(others, dict):
                yield from self.problems(one, others, f"{path}.{name}")
            elif others is False or (known and others is None):
                yield f"{path}.{name}: is not known"


def _has_type(value: object, schema: Json) -> bool:
    wanted = schema.get("type")
    if wanted is None or (value is None and schema.get("nullable")):
        return True
    names = [wanted] if isinstance(wanted, str) else wanted
    # Python's booleans are integers.
    is_boolean = isinstance(value, bool)
    return any(
        isinstance(value, _TYPES[name]) and is_boolean == (name == "boolean") for name in names
    )


def read(path: pathlib.Path) -> Json:
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found
