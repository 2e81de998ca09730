"""Responses to list and watch requests, around the objects themselves."""

from typing import Final, Literal, TypeVar

import msgspec

from agent.kube import objects
from agent.kube.client import ApiError

_TOO_LARGE: Final = "ResourceVersionTooLarge"

T = TypeVar("T")


class ListMetadata(msgspec.Struct, rename="camel"):
    """metav1.ListMeta."""

    resource_version: str = ""


class ObjectList(msgspec.Struct):
    """Any list; its objects are read one by one (agent/kube/lists.py)."""

    metadata: ListMetadata = msgspec.field(default_factory=ListMetadata)


class WatchEvent(msgspec.Struct):
    """metav1.WatchEvent."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class PartialMetadata(msgspec.Struct, rename="camel"):
    """The metadata of any object, also of one that cannot be decoded as a whole."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class PartialObject(msgspec.Struct):
    """An object of which only the metadata is read, such as a bookmark."""

    metadata: PartialMetadata


def decode(content: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode any bytes. Raises `msgspec.DecodeError`, and nothing else."""
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("JSON is not UTF-8") from error


def is_json(content: bytes) -> bool:
    """Whether it is JSON of a usual depth, whatever it contains."""
    try:
        decode(content, msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def decode_partial(raw: bytes | msgspec.Raw) -> PartialMetadata | None:
    """The metadata of any object; None if even that cannot be decoded."""
    try:
        return decode(raw, PartialObject).metadata
    except msgspec.DecodeError:
        return None


def status(raw: msgspec.Raw) -> objects.ApiStatus:
    """The object of an ERROR event."""
    try:
        return decode(raw, objects.ApiStatus)
    except msgspec.DecodeError:
        return objects.ApiStatus(message="the watch ended with an error that cannot be decoded")


def is_too_large(error: ApiError) -> bool:
    """apimachinery's NewTooLargeResourceVersionError; the text is that of servers before 1.17."""
    return any(reason == _TOO_LARGE for _, reason in error.causes) or (
        "Too large resource version" in str(error)
    )
