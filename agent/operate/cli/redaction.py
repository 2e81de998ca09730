"""Removal of secrets from text that leaves the node.

What `podgate bugtool` archives has none by its nature. This is for what users wrote into names and
messages, and for log lines of other versions.
"""

import re
from collections.abc import Iterator

LEFT_OUT = "(left out)"

# Users write the text, and it may be megabytes: each pattern takes linear time, since no start in a
# run of characters is tried after another one of the same run (lookbehinds), and no end is tried
# again (possessive quantifiers).
_PATTERNS = (
    # PEM; in JSON its lines are joined by \n.
    (
        re.compile(
            r"-----BEGIN [A-Z ]*+(?<=PRIVATE KEY)-----.*?(?:-----END [A-Z ]*+-----|$)", re.S
        ),
        "",
    ),
    (re.compile(r"((?:proxy-)?authorization\W{1,6}(?:\w++ )?)[^\s\"',}]++", re.I), r"\1"),
    (re.compile(r"(\bbearer )[\w.~+/=-]++", re.I), r"\1"),
    # Of a URL: scheme://user:password@host
    (re.compile(r"(?<=[a-z0-9+.-]://)[^\s/@\"']++@", re.I), ""),
    # The kubelet's mark in the default-deny table, which no other process may know.
    (re.compile(r"(meta priority )[0-9a-f]++:[0-9a-f]++"), r"\1"),
)
# JSON Web Tokens (RFC 7519), as service accounts have: a part, then what follows it.
_TOKEN_PART = re.compile(r"(?<![\w-])[\w-]++(?=\.[\w-]{8})")
_TOKEN_START = re.compile(r"\beyJ(?=[\w-]{8})")
_TOKEN_REST = re.compile(r"\.[\w-]++(?:\.[\w-]*+)?")
# name: value, "name": "value", name=value
_NAME = re.compile(r"(?<![\w.-])([\w.-]++)\"?\s*+[:=]\s*+")
_SECRET = re.compile(
    r"token|passw(?:or)?d|secret|api[_-]?key|client-key-data|private[_-]?key", re.I
)
_VALUE = re.compile(r"\"(?:[^\"\\]|\\.)*+\"|'[^']*+'|[^\s,;}\]]++", re.S)


def redact(text: str) -> tuple[str, int]:
    """The text without secrets, and how many were replaced. Takes linear time."""
    count = 0
    for spans in (_tokens, _values):
        text, replaced = _without(text, spans(text))
        count += replaced
    for pattern, kept in _PATTERNS:
        text, replaced = pattern.subn(kept + LEFT_OUT, text)
        count += replaced
    return text, count


def _without(text: str, spans: Iterator[tuple[int, int]]) -> tuple[str, int]:
    parts: list[str] = []
    done = count = 0
    for start, end in spans:
        if start >= done:
            parts += (text[done:start], LEFT_OUT)
            done = end
            count += 1
    return "".join([*parts, text[done:]]), count


def _tokens(text: str) -> Iterator[tuple[int, int]]:
    for part in _TOKEN_PART.finditer(text):
        start = _TOKEN_START.search(text, part.start(), part.end())
        rest = _TOKEN_REST.match(text, part.end())
        if start and rest:
            yield start.start(), rest.end()


def _values(text: str) -> Iterator[tuple[int, int]]:
    done = 0
    for name in _NAME.finditer(text):
        # A value that has more names is read once.
        if name.start() < done or not _SECRET.search(name[1]):
            continue
        if value := _VALUE.match(text, name.end()):
            done = value.end()
            yield value.span()
