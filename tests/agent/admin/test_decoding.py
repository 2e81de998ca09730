"""Reports of agents of other versions: as much of them as both know, and never an exception."""

import datetime

import msgspec
import pytest

from agent.admin import decoding, observations, report

AT = datetime.datetime(2026, 1, 31, 8, tzinfo=datetime.UTC)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Inner(msgspec.Struct, kw_only=True, rename="camel"):
    name: str
    hit_count: int = 3


class Outer(msgspec.Struct, kw_only=True, rename="camel"):
    text: str
    number: int
    share: float
    is_up: bool
    at: datetime.datetime
    maybe: str | None
    inner: Inner
    rows: list[Inner]
    pairs: tuple[tuple[str, int], ...]
    by_name: dict[str, dict[str, int]]


FULL = Outer(
    text="a",
    number=1,
    share=0.5,
    is_up=True,
    at=AT,
    maybe=None,
    inner=Inner(name="b"),
    rows=[Inner(name="c", hit_count=4)],
    pairs=(("http", 80),),
    by_name={"drop": {"node": 2}},
)
EMPTY = Outer(
    text="",
    number=0,
    share=0.0,
    is_up=False,
    at=EPOCH,
    maybe=None,
    inner=Inner(name=""),
    rows=[],
    pairs=(),
    by_name={},
)


def test_fields_of_this_version_are_kept_beside_others() -> None:
    content = msgspec.json.decode(msgspec.json.encode(FULL)) | {"news": [1]}
    assert decoding.decode(msgspec.json.encode(content), Outer) == FULL


@pytest.mark.parametrize("field", ["text", "number", "share", "isUp", "at", "inner", "byName"])
def test_missing_field_is_empty_and_the_others_are_kept(field: str) -> None:
    content = msgspec.json.decode(msgspec.json.encode(FULL))
    del content[field]
    expected = msgspec.json.decode(msgspec.json.encode(EMPTY))[field]
    found = decoding.decode(msgspec.json.encode(content), Outer)
    assert msgspec.json.decode(msgspec.json.encode(found)) == content | {field: expected}


@pytest.mark.parametrize(
    "content", ["{}", "[]", "7", "null", '{"inner": 1, "rows": {}, "at": "x"}']
)
def test_anything_that_is_json_is_decoded(content: str) -> None:
    assert decoding.decode(content.encode(), Outer) == EMPTY


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"number": True}, {"number": 0}),
        ({"number": 1.5}, {"number": 0}),
        ({"isUp": 1}, {"isUp": False}),
        ({"share": True}, {"share": 0.0}),
        ({"share": 3}, {"share": 3.0}),
        ({"share": "3"}, {"share": 0.0}),
        ({"at": 5}, {"at": "1970-01-01T00:00:00Z"}),
        ({"at": "2026-01-31T08:00:00Z"}, {"at": "2026-01-31T08:00:00Z"}),
        ({"maybe": None}, {"maybe": None}),
        ({"maybe": "a"}, {"maybe": "a"}),
        ({"maybe": 5}, {"maybe": ""}),
        ({"pairs": [["a", 1], ["b"], 7]}, {"pairs": [["a", 1], ["b", 0], ["", 0]]}),
        ({"pairs": [["a", 1, "more"]]}, {"pairs": [["a", 1]]}),
        ({"rows": [{"name": 5, "hitCount": 9}]}, {"rows": [{"name": "", "hitCount": 9}]}),
        ({"byName": {"a": {"b": 1, "c": "x"}}}, {"byName": {"a": {"b": 1, "c": 0}}}),
        ({"byName": {"a": 1}}, {"byName": {"a": {}}}),
    ],
    ids=str,
)
def test_value_of_another_type_is_empty_and_the_others_are_kept(
    given: dict[str, object], expected: dict[str, object]
) -> None:
    empty = msgspec.json.decode(msgspec.json.encode(EMPTY))
    found = decoding.decode(msgspec.json.encode(given), Outer)
    assert msgspec.json.decode(msgspec.json.encode(found)) == empty | expected


def test_defaults_of_this_version_are_used() -> None:
    content = b'{"inner": {"name": "x"}, "rows": [{}, {"hitCount": 9}]}'
    found = decoding.decode(content, Outer)
    assert found.inner == Inner(name="x", hit_count=3)
    assert found.rows == [Inner(name="", hit_count=3), Inner(name="", hit_count=9)]


def test_text_that_is_no_json_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        decoding.decode(b"<html>", Outer)


@pytest.mark.parametrize(
    "kind",
    [
        report.AgentReport,
        report.Drops,
        report.DropEvents,
        report.RulesReport,
        observations.Observations,
    ],
)
def test_every_report_can_be_read_from_an_agent_that_knows_nothing_of_it(
    kind: type[msgspec.Struct],
) -> None:
    assert isinstance(decoding.decode(b"{}", kind), kind)
