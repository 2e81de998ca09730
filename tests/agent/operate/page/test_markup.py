"""Text becomes no markup, neither between elements nor in their attributes."""

import pytest

from agent.operate.page.markup import Markup, Node, document, element, escape, join


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("a <b> & \"c\" 'd'", "a &lt;b&gt; &amp; &quot;c&quot; &#x27;d&#x27;"),
        (" a\n\tb ", "a b"),
        ("a\x07\u202eb", "a\ufffd\ufffdb"),
        ("größe\u00a0x", "größe x"),
        ("a\ue000b", "a\ue000b"),
        (7, "7"),
        (Markup("<b>"), "<b>"),
    ],
)
def test_text_is_escaped_and_markup_stays(node: str | int, expected: str) -> None:
    assert escape(node) == expected
    assert element("p", node) == f"<p>{expected}</p>"
    assert element("p", title=node) == f'<p title="{expected}"></p>'


def test_attributes_have_their_names_in_html() -> None:
    attributes: dict[str, Node] = {"class_": "x", "data_label": "a b", "http_equiv": 1}
    assert element("p", **attributes) == '<p class="x" data-label="a b" http-equiv="1"></p>'
    assert element("meta", name="robots", content="none") == '<meta name="robots" content="none">'
    assert element("path", d="M0 0") == '<path d="M0 0"/>'


def test_document_has_its_head_and_body() -> None:
    head, body = element("head"), element("body", join(["ä", element("b", "x")]), "<")
    assert document(head, body).decode() == (
        '<!DOCTYPE html>\n<html lang="en"><head></head><body>ä<b>x</b>&lt;</body></html>\n'
    )
