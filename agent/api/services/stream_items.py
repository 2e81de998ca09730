"""A stream's items, made of services that are encoded already.

A repeated field is its elements one after the other, each with its tag and length
(https://protobuf.dev/programming-guides/encoding). So a service is encoded once, and not again for
each revision and each reader.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from agent.client import endpoints_pb2 as pb

# gRPC's own limit for what a client takes is 4 MiB, and between small parts others have their turn.
_PART_BYTES: Final = 64 << 10
_LENGTH_DELIMITED: Final = 2


def header(instance_id: int, rev: int) -> bytes:
    """The item that a state begins with."""
    known = pb.NextFilter(instance_id=instance_id, rev=rev)
    encoded: bytes = pb.NextItem(next=known).SerializeToString()
    return encoded


def element(service: pb.ServiceEndpoints) -> bytes:
    """A service as `parts` takes it. The same service is always the same bytes."""
    return _field(pb.Services.ITEMS_FIELD_NUMBER, service.SerializeToString(deterministic=True))


def parts(elements: Iterable[bytes]) -> Iterator[bytes]:
    """The items between header and end."""
    part: list[bytes] = []
    size = 0
    for one in elements:
        part.append(one)
        size += len(one)
        if size >= _PART_BYTES:
            yield _field(pb.NextItem.SERVICES_FIELD_NUMBER, b"".join(part))
            part, size = [], 0
    if part:
        yield _field(pb.NextItem.SERVICES_FIELD_NUMBER, b"".join(part))


def end(service_count: int) -> bytes:
    """The item that a state ends with."""
    encoded: bytes = pb.NextItem(end=pb.End(service_count=service_count)).SerializeToString()
    return encoded


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
