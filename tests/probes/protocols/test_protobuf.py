"""Fields are written as by protobuf's library."""

import pytest
from google.protobuf import wrappers_pb2

from probes.protocols import protobuf


@pytest.mark.parametrize(
    "value", [1, 127, 128, 129, 300, 16383, 16384, 2**31, 2**63 - 1, -1, -128, -(2**63)]
)
def test_number_is_written_as_by_protobuf(value: int) -> None:
    expected = wrappers_pb2.Int64Value(value=value).SerializeToString()
    assert protobuf.varint(1 << 3 | protobuf.VARINT) + protobuf.varint(value) == expected


@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_text_is_written_as_by_protobuf(length: int) -> None:
    expected = wrappers_pb2.StringValue(value="x" * length).SerializeToString()
    assert protobuf.delimited(1, b"x" * length) == expected
