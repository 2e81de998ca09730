"""Kinds of policies, for what is the same for each: sources of documents, and saved ones."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from agent.errors import PodgateError


class PolicyError(PodgateError):
    """The document is not a valid policy; the message names the field and the mistake."""


class NamedPolicy(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A valid policy of any kind. source: its origin, for messages; document: as the API has it;
    generation: of the API's object, or 0."""

    name: str
    source: str
    document: Any
    generation: int = 0


P = TypeVar("P", bound=NamedPolicy)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyKind(Generic[P]):
    """A resource of the group policy.podgate.io.

    read: a policy from a decoded document and its origin; raises `PolicyError`.
    """

    name: str
    plural: str
    read: Callable[[object, str], P]


def convert(document: object, kind: type[msgspec.Struct]) -> Any:
    """The document as this struct. Raises `PolicyError`."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        field = path.removesuffix("`").removeprefix(".")
        problem = text[:1].lower() + text[1:]
        raise PolicyError(f"{field}: {problem}" if field else problem) from error
