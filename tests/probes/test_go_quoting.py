"""What a server sent is quoted as by Go, and never at any length."""

import pytest

from probes import go_quoting


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", '""'),
        (b"plain text!", '"plain text!"'),
        (b'a"b\\', r'"a\"b\\"'),
        (b"\x00\t\r\n\x7f", r'"\x00\t\r\n\x7f"'),
        (b"\xff", r'"\xff"'),
        ("é\u200b\U000e0001".encode(), r'"é\u200b\U000e0001"'),
        ("\uffff\U0001fffe".encode(), r'"\uffff\U0001fffe"'),
        (b"\x80\xfe", r'"\x80\xfe"'),
    ],
)
def test_bytes_are_quoted_as_by_go(data: bytes, text: str) -> None:
    assert go_quoting.quoted(data) == text


def test_long_data_ends_with_dots() -> None:
    most = go_quoting.QUOTED_MAX_BYTES
    assert go_quoting.quoted(b"a" * most) == f'"{"a" * most}"'
    assert go_quoting.quoted(b"a" * (most + 1)) == f'"{"a" * most}"...'


def test_long_list_ends_with_dots() -> None:
    assert go_quoting.quoted_list([b"a", b"b"]) == '["a" "b"]'
    assert go_quoting.quoted_list([b"a"] * 32) == "[" + '"a" ' * 31 + '"a"]'
    assert go_quoting.quoted_list([b"a"] * 33) == "[" + '"a" ' * 32 + "...]"
