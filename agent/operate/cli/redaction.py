"""Removal of secrets from text that leaves the node.

What `podgate bugtool` archives has none by its nature. This is for what users wrote into names and
messages, and for log lines of other versions.
"""

import re

LEFT_OUT = "(left out)"

_NAMES = r"[\w.-]*(?:token|passw(?:or)?d|secret|api[_-]?key|client-key-data|private[_-]?key)[\w.-]*"
_PATTERNS = (
    # PEM; in JSON its lines are joined by \n.
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|$)", re.S), ""),
    # JSON Web Tokens (RFC 7519), as service accounts have.
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"), ""),
    (re.compile(r"((?:proxy-)?authorization\W{1,6}(?:\w+ )?)[^\s\"',}]+", re.I), r"\1"),
    (re.compile(r"(\bbearer )[\w.~+/=-]+", re.I), r"\1"),
    # Of a URL: scheme://user:password@host
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@\"']+@", re.I), r"\1"),
    # name: value, "name": "value", name=value
    (
        re.compile(rf"(\b{_NAMES}\"?\s*[:=]\s*)(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s,;}}\]]+)", re.I),
        r"\1",
    ),
    # The kubelet's mark in the default-deny table, which no other process may know.
    (re.compile(r"(meta priority )[0-9a-f]+:[0-9a-f]+"), r"\1"),
)


def redact(text: str) -> tuple[str, int]:
    """The text without secrets, and how many were replaced."""
    count = 0
    for pattern, kept in _PATTERNS:
        text, replaced = pattern.subn(kept + LEFT_OUT, text)
        count += replaced
    return text, count
