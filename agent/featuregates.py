"""Feature gates, written as Kubernetes' components take them: `Name=true,Other=false`."""

from typing import Final

import msgspec

_WORDS: Final = {"true": True, "false": False}


class FeatureGates(msgspec.Struct, frozen=True, kw_only=True):
    """What is on."""

    pod_info_api: bool = msgspec.field(default=True, name="PodInfoAPI")
    """The PodInfo socket (KEP-4188 names the gate)."""


def parse(text: str) -> FeatureGates:
    """The gates that `text` sets, the others at their defaults. Raises `ValueError`."""
    known = ", ".join(field.encode_name for field in msgspec.structs.fields(FeatureGates))
    given: dict[str, bool] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, word = part.partition("=")
        if not separator or word.strip().lower() not in _WORDS:
            raise ValueError(f"{part!r} is not NAME=true or NAME=false")
        if name.strip() not in known.split(", "):
            raise ValueError(f"there is no feature gate {name.strip()!r}; known: {known}")
        given[name.strip()] = _WORDS[word.strip().lower()]
    return msgspec.convert(given, FeatureGates)
