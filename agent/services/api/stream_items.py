"""A stream's items, assembled from services that are already encoded.

A repeated field is its elements one after the other, each with its tag and length
(https://protobuf.dev/programming-guides/encoding). So a service is encoded once, and not again for
each revision and each reader.
"""

import datetime
from collections.abc import Iterable, Iterator

from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from probes.protocols import protobuf

# gRPC clients accept 4 MiB by default; other tasks of the loop run between small parts.
_PART_BYTES = 64 << 10


def header(
    request: pb.NextFilter,
    instance_id: int,
    rev: int,
    *,
    saved_at: datetime.datetime | None,
    is_delta: bool,
) -> bytes:
    """The first item of a state, with the filter of the request at that position."""
    item = pb.NextItem(next=request, saved_at=saved_at, is_delta=is_delta)
    item.next.instance_id, item.next.rev = instance_id, rev
    encoded: bytes = item.SerializeToString()
    return encoded


def element(service: pb.ServiceEndpoints) -> bytes:
    """A service as `parts` needs it. The same service is always the same bytes."""
    return protobuf.delimited(
        pb.Services.ITEMS_FIELD_NUMBER, service.SerializeToString(deterministic=True)
    )


def removed(key: tuple[str, str]) -> bytes:
    """A service that a delta removes, as `parts` needs it. key: namespace and name."""
    name = pb.ServiceName(namespace=key[0], name=key[1])
    return protobuf.delimited(pb.Services.REMOVED_FIELD_NUMBER, name.SerializeToString())


def parts(elements: Iterable[bytes]) -> Iterator[bytes]:
    """The items between header and end."""
    part: list[bytes] = []
    size = 0
    for encoded in elements:
        part.append(encoded)
        size += len(encoded)
        if size >= _PART_BYTES:
            yield protobuf.delimited(pb.NextItem.SERVICES_FIELD_NUMBER, b"".join(part))
            part, size = [], 0
    if part:
        yield protobuf.delimited(pb.NextItem.SERVICES_FIELD_NUMBER, b"".join(part))


def end(service_count: int) -> bytes:
    """The last item of a state."""
    encoded: bytes = pb.NextItem(end=pb.End(service_count=service_count)).SerializeToString()
    return encoded
