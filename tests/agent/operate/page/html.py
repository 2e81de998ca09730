"""A page as a tree, by the standard library's parser: as a browser reads it, not as text."""

import dataclasses
import html.parser
from collections.abc import Iterator

_VOID = frozenset({"meta", "path", "line"})


@dataclasses.dataclass
class Element:
    """One element; text: of it and what it contains, without that of style sheets."""

    name: str
    attributes: dict[str, str]
    children: list["Element"] = dataclasses.field(default_factory=list)
    words: list[str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, name: str = "") -> Iterator["Element"]:
        for child in self.children:
            if not name or child.name == name:
                yield child
            yield from child.all(name)

    def with_class(self, name: str) -> list["Element"]:
        return [each for each in self.all() if name in each.attributes.get("class", "").split()]


class _Parser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("document", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(made)
        if tag not in _VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        closed = self.open.pop()
        assert closed.name == tag, f"<{closed.name}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        if self.open[-1].name != "style":
            for element in self.open:
                element.words.append(data)


def parse(page: bytes) -> Element:
    """Raises `AssertionError` if an element is not closed, or not by its own end."""
    parser = _Parser()
    parser.feed(page.decode())
    parser.close()
    assert len(parser.open) == 1, f"<{parser.open[-1].name}> is not closed"
    return parser.open[0]
