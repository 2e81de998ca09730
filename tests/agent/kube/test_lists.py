"""Lists, item by item: the same as if they were read at once, in little memory."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kube.client import ApiError
from agent.kube.lists import ListSplitter

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text() | st.just("items"), JSON, max_size=3)
METADATA = {"resourceVersion": "7"}


def _split(content: bytes, size: int) -> tuple[list[Any], Any]:
    splitter = ListSplitter()
    items = [
        item
        for at in range(0, len(content), size)
        for item in splitter.feed(content[at : at + size])
    ]
    items += splitter.finish()
    return [json.loads(item) for item in items], json.loads(splitter.envelope)


@given(
    items=st.lists(OBJECTS, max_size=5),
    size=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
    # Typed lists end with their items; those of custom resources are sorted by key.
    order=st.permutations(["kind", "metadata", "items"]),
)
def test_items_and_the_rest_are_those_of_the_whole(
    items: list[Any], size: int, indent: int | None, is_ascii: bool, order: list[str]
) -> None:
    whole = {"kind": 'A "items":[ List', "metadata": METADATA, "items": items}
    text = json.dumps({key: whole[key] for key in order}, indent=indent, ensure_ascii=is_ascii)
    found, envelope = _split(text.encode("utf-8", "surrogatepass"), size)
    assert found == items
    assert envelope == {**whole, "items": []}


@given(size=st.integers(1, 40), end=st.integers(0, 60))
def test_list_that_ends_early_is_an_error(size: int, end: int) -> None:
    content = b'{"kind":"PodList","metadata":{"resourceVersion":"7"},"items":[{"a":{}},{"b":"}"}]}'
    with pytest.raises((ApiError, json.JSONDecodeError)):
        _split(content[: len(content) - 1 - end], size)


@given(st.lists(st.binary(max_size=20)))
def test_any_bytes_are_read_or_an_error(parts: list[bytes]) -> None:
    splitter = ListSplitter()
    try:
        for part in parts:
            splitter.feed(part)
        splitter.finish()
    except ApiError:
        pass


def test_object_without_an_end_is_an_error_at_16_mib() -> None:
    splitter = ListSplitter()
    splitter.feed(b'{"items":[{"a":"' + b"x" * (15 << 20))
    with pytest.raises(ApiError, match="more than"):
        splitter.feed(b"x" * (16 << 20))


def test_long_string_in_small_packets_is_read_in_linear_time() -> None:
    """9 MB in packets of 16 KiB: each byte would be scanned 300 times."""
    splitter = ListSplitter()
    splitter.feed(b'{"items":[{"a":"')
    for _ in range(600):
        splitter.feed(b"\\u0001" * 2730)
    (item,) = splitter.feed(b'"}') + splitter.feed(b"]}") + splitter.finish()
    assert len(item) > 9_000_000
