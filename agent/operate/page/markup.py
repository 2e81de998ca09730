"""HTML elements. Text is escaped where an element is made, so a document cannot forget it."""

import html
import unicodedata
from collections.abc import Iterable


class Markup(str):
    """HTML that is already escaped."""

    __slots__ = ()


Node = Markup | str | int | float
"""What an element contains: markup, or a text or number to escape."""

# Control and format characters change how a text is shown, some of them that of the text after it;
# surrogates are bytes that were no UTF-8.
_HIDDEN = frozenset({"Cc", "Cf", "Cs"})
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_VOID = frozenset({"meta", "path", "line"})


def escape(node: Node) -> Markup:
    """The node as HTML, with any white space as one space, as a browser shows it."""
    if isinstance(node, Markup):
        return node
    text = " ".join(str(node).split())
    if not text.isprintable():
        text = "".join(
            _REPLACEMENT if unicodedata.category(each) in _HIDDEN else each for each in text
        )
    return Markup(html.escape(text, quote=True))


def element(name: str, /, *children: Node, **attributes: Node) -> Markup:
    """One element. Names of attributes end in an underscore if they are words of Python; other
    underscores stand for hyphens."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
    )
    if name in _VOID:
        return Markup(f"<{name}{shown}>" if name == "meta" else f"<{name}{shown}/>")
    return Markup(f"<{name}{shown}>{join(children)}</{name}>")


def join(nodes: Iterable[Node]) -> Markup:
    """The nodes one after the other."""
    return Markup("".join(map(escape, nodes)))


def document(head: Markup, body: Markup) -> bytes:
    """A whole page in UTF-8."""
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'.encode()
