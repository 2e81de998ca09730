"""Hostile redirects, and odd paths and headers of requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from tests.probes.hostile.answers import (
    ADDRESS,
    CLOSED_PORT,
    ILL,
    OK,
    PORT,
    Answer,
    Case,
    with_header,
)

_HERE = f"{ADDRESS}:{PORT}"
_REFERENCES = [
    *("/", "x", "/x", "./x", "../x", "/a/../b", "/a/./b/", "/a//b", "/..", "/.", ".", "..", "//"),
    *("///x",),
    *("?q", "?", "/?", "/x?a b", "/x?%zz", "/x?a?b", "/x?a#f", "#f", "#", "/x#f%20g", "/x#%zz"),
    *("/x#",),
    *("/%zz", "/%", "/%2", "/%2f", "/%2F%41", "/a%2fb c", "/a b", "/é", "/\xff", "/a\tb"),
    *("/a\\b", '/a"b'),
    *("/[x]!*'()", "/a;b=c,d", "/a|b^`{}", "*", "/*", "a:b", "./a:b", ":a", "1a:b", "a/b:c"),
    *("/a:b",),
    *(f"http://{_HERE}", f"http://{_HERE}/x", f"//{_HERE}/x", f"HTTP://{_HERE}/x"),
    *(f"http:///{_HERE}/x",),
    *(f"http:/{_HERE}/x", f"http:{_HERE}/x", f"http://{_HERE}?q", f"http://{_HERE}#f", "http://"),
    *("http:",),
    *(f"http://{ADDRESS}:0{PORT}/x", f"http://{ADDRESS}:000{PORT}/x"),
    *(f"http://{ADDRESS}:+{PORT}/x",),
    *(f"http://{ADDRESS}:{CLOSED_PORT}/x", f"http://{ADDRESS}:99999/x", f"http://{ADDRESS}:0/x"),
    *(f"http://{ADDRESS}:65536/x", f"http://{ADDRESS}:{'9' * 30}/", f"http://{ADDRESS}:x/"),
    *("http://:80/",),
    *(f"http://{_HERE}:1/x", f"ftp://{_HERE}:1:2/x", f"http://[{ADDRESS}]:{PORT}/"),
    *("http://[::1", "http://["),
    *(f"http://[::ffff:{ADDRESS}]:{PORT}/", "http://[::1]x/", "http://[::1%25lo]/"),
    *("http://[::1%lo]/",),
    *("http://a[b]/", "http://[x]/", "http://[::1]:x/", "//[::g]/", "http://%31/"),
    *("http://%c3%a9/", "//%/"),
    *(f"http://u@{_HERE}/x", f"http://u:p@{_HERE}/x", f"//u:@{_HERE}/x", f"http://@{_HERE}/x"),
    *("//u@/x",),
    *(f"http://u%40:p%3a%2f@{_HERE}/x", f"http://u%zz@{_HERE}/", f"http://u b@{_HERE}/"),
    *(f"http://a@b:c@{_HERE}/",),
    *(f"http://u\\@{_HERE}/", f"http://é@{_HERE}/", "http://u:p@other/", f"http://{ADDRESS}./"),
    *("http://0x7f.1/",),
    *("http://other/x", "//other", f"https://other:{PORT}/", "http://LOCALHOST/", "http://a b/"),
    *("http://a\\b/",),
    *(f"ftp://{_HERE}/x", f"javascript://{_HERE}/x", "mailto:a@b", "javascript:x", "file:///x"),
    *("data:,x",),
    *(f"https://{_HERE}/x", f"https://{ADDRESS}:{CLOSED_PORT}/", f"unix://{_HERE}/"),
    *(f"1http://{_HERE}/",),
    *(f"h2c://{_HERE}/", f"h-t.t+p://{_HERE}/x?y#z", f" http://{_HERE}/", "", " ", "\t", "/x "),
    *(" /x", "a b"),
    *("/" + "y" * 300, "/" + "y" * 3000, "../" * 200 + "x", "/%0a%0d", "/%00", "/%7f%80"),
    *("/a%20b%zz", "a%3ab"),
    *("//a:80:90/x", "//a:/x", "//:/x", "//::1/x", "//a]/", "//a[/", "//<>/", '//"/', "//a,b/"),
    *("//a!$&'()*+;=~/",),
]


def redirects(chance: random.Random) -> Iterator[Case]:
    bases = ["/", "/a/b?q", "x", "/a/b/?", "/a%2fb/c", "/a/b#f", "//u:p@h/x/y", "/?"]
    for reference in _REFERENCES:
        line = b"Location: " + reference.encode("latin-1" if "\xff" in reference else "utf-8")
        good = Answer(with_header(line + b"\r\nContent-Length: 2", b"302 F"))
        for base in (bases[0], chance.choice(bases[1:]), chance.choice(bases[1:])):
            yield Case((good, Answer(OK)), base)
        for base in chance.sample(bases, 2):
            yield Case((good, Answer(ILL)), base, (("Host", chance.choice(["h", _HERE, "a b"])),))
    for status in (300, 301, 302, 303, 304, 305, 306, 307, 308, 309, 201, 404):
        for line in (
            b"Location: /x",
            b"location:/x",
            b"Location : /x",
            b"X: y",
            b"Location:",
            b"Location: \r\nLocation: /x",
        ):
            head = with_header(line + b"\r\nContent-Length: 2", b"%d R" % status)
            yield Case((Answer(head), Answer(OK)))
    for body, end in itertools.product((b"", b"ab", b"b" * 2048, b"b" * 5000), ("close", "reset")):
        for framing in (
            b"X: y",
            b"Content-Length: 2",
            b"Content-Length: 3000",
            b"Transfer-Encoding: chunked",
        ):
            for line in (b"Location: /x\r\n", b"Location: //other/\r\n"):
                data = with_header(line + framing, b"302 F", body)
                yield Case((Answer(data, "reset" if end == "reset" else "close"), Answer(OK)))
    for framing in (
        b"X: y",
        b"Content-Length: 9",
        b"Content-Length: 3000",
        b"Transfer-Encoding: chunked",
    ):
        for body in (b"ab", b"b" * 2500):
            data = with_header(b"Location: /x\r\n" + framing, b"302 F", body)
            yield Case((Answer(data, "hold"), Answer(OK)))
    hop = b"HTTP/1.1 302 F\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n"
    for where in (
        b"x",
        b"/y",
        f"http://{_HERE}/z?a#b".encode(),
        b"//" + _HERE.encode(),
        b"x/",
        b"?",
        b"#x",
    ):
        for count in (2, 8, 9, 10, 11):
            yield Case((*[Answer(hop % where)] * count, Answer(OK)), chance.choice(bases))
    for _ in range(150):
        lines = [chance.choice(_REFERENCES[:60]).encode("latin-1") for _ in range(3)]
        yield Case(
            (*[Answer(hop % line) for line in lines], Answer(OK)),
            chance.choice(bases),
            chance.choice(
                [
                    (),
                    (),
                    (("Host", "h"),),
                    (("Authorization", "a"),),
                    (("Referer", chance.choice(["", "r"])),),
                ]
            ),
        )


def requests(chance: random.Random) -> Iterator[Case]:
    answer = (Answer(OK),)
    for path in (
        *_REFERENCES,
        *("/" + chr(code) for code in range(1, 128)),
        "/€",
        "\U0001f600",
        "//h:1:2/x",
    ):
        yield Case(answer, path)
    words = [
        "/",
        "//",
        "a",
        "%41",
        "%2f",
        "%zz",
        "%",
        "?",
        "#",
        ":",
        "@",
        "..",
        ".",
        " ",
        "é",
        "[",
        "]",
        ";",
        "&",
        "\n",
        "*",
        "+",
    ]
    for _ in range(400):
        yield Case(answer, "".join(chance.choices(words, k=chance.randrange(1, 7))))
    names = [
        "Host",
        "host",
        "User-Agent",
        "Accept",
        "accept",
        "Connection",
        "X-A",
        "x-b-C",
        "Content-Length",
        "Referer",
    ]
    values = [
        "",
        " ",
        "v",
        " v ",
        "a, b",
        "é",
        "close",
        "Keep-Alive, close",
        "Upgrade",
        "h:80",
        "[::1%25lo]:80",
        "a/b",
        "a b",
        "\tv",
    ]
    for name, value in itertools.product(names, values):
        yield Case(answer, "/", ((name, value),))
    for _ in range(120):
        yield Case(
            answer, "/", tuple((chance.choice(names), chance.choice(values)) for _ in range(3))
        )
    for name in (
        "Transfer-Encoding",
        "Trailer",
        "Expect",
        "TE",
        "Upgrade",
        "Cookie",
        "Authorization",
        "x_y",
        "X.Z",
        "-a-",
        "a--b",
    ):
        yield Case(answer, "/", ((name, "chunked"), (name.lower(), "v")))
    for value in (
        "a\nb",
        "a\rb",
        "a\x00b",
        "a\x7fb",
        "a\x01",
        "\x1f",
        "é\u2028",
        "a\\b",
        "h<>",
        "h^",
        "h{}",
        'h"',
        "h|",
        "h`",
        "h#",
        "h?",
        "h%",
    ):
        yield Case(answer, "/", (("X", value),))
        yield Case(answer, "/", (("Host", value),))
