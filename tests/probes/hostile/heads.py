"""Hostile status lines, header fields and framing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from tests.probes.hostile.answers import BYTES, OK, Case, plain, with_header


def status_lines(chance: random.Random) -> Iterator[Case]:
    versions = [
        *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/0.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/2"),
        *(b"HTTP/1.10", b"HTTP/1,1", b"HTTP/1.x", b"HTTP/+.1", b"http/1.1", b"HTTP", b"", b"ICY"),
        *(b"HTTP/ 1.1", b"HTTP/1.1\t", b"HTTPS/1.1", b"\xef\xbb\xbfHTTP/1.1", b"\x00HTTP/1.1"),
        *(b"SSH-2.0-OpenSSH_9.2p1 Debian", b"220 mail ESMTP", b'"quoted\\', b"\xc3\xa9\xff\x7f"),
    ]
    codes = [
        *(b"200 OK", b"200", b"200 ", b"", b" ", b"  200  OK", b"2000 OK", b"20 OK", b"+20 OK"),
        *(b"-20 x", b"-00 x", b"000 x", b"020 x", b"2OO OK", b"200\tOK", b"\t200 OK", b"999 x"),
        *(b"1e2 x", b"0x2 x", b"\xd9\xa2\xd9 x", b"200 \x00\x7f", b"200 O\rK", b"200 \xff", b"-1 "),
    ]
    body = b"\r\nContent-Length: 2\r\n\r\nok"
    for version, code in itertools.product(versions[:7], codes):
        yield from plain(version + b" " + code + body)
    for version in versions[7:]:
        yield from plain(version + b" 200 OK" + body, version, version + b"\r\n\r\n")
    for status in (
        *range(100, 106),
        *range(199, 209),
        *range(226, 230),
        *range(298, 310),
        399,
        400,
    ):
        yield from plain(with_header(b"Content-Length: 2", b"%d X" % status))
        yield from plain(with_header(b"X: y", b"%d X" % status))
        yield from plain(with_header(b"Transfer-Encoding: chunked", b"%d X" % status, b"0\r\n\r\n"))
    for lead in (b"\n", b"\r\n", b" ", b"\r", b"\x00", b"\r\n\r\n", b"junk\n", b"junk\r\n"):
        yield from plain(lead + OK, lead)
    for ending in (b"\n", b"\r\n", b"\r\r\n", b"\n\r", b"\r", b" \r\n", b"\x0b\r\n", b"\x85\r\n"):
        yield from plain(
            b"HTTP/1.1 200 OK" + ending + b"Content-Length: 2" + ending + ending + b"ok"
        )
    for size in (1000, 4080, 4095, 4096, 4097, 9000, 100_000):
        yield from plain(b"HTTP/1.1 200 " + b"x" * size + body, b"HTTP/1.1 200" + b"x" * size)
        yield from plain(b"y" * size + b"\r\n" + OK, b"y" * size)
    for byte in BYTES:
        yield from plain(b"HTTP/1.1 200 O" + byte + b"K" + body)


def header_names(chance: random.Random) -> Iterator[Case]:
    for byte in BYTES:
        yield from plain(with_header(b"A" + byte + b"B: 1\r\nContent-Length: 2"))
        yield from plain(with_header(byte + b": 1\r\nContent-Length: 2"))
    for name in (b"Content-Length", b"Transfer-Encoding", b"Location", b"Connection"):
        value = {b"C": b"2", b"T": b"chunked", b"L": b"/x"}[name[:1]]
        for form in (
            *(b"%s : %s", b" %s: %s", b"%s\t: %s", b"\t%s: %s", b"%s:%s", b"%s:\t %s \t"),
            *(b"%s::%s",),
            *(b"%s:%s\r", b"%s\x00: %s", b"%s:\x00%s", b"%s: %s\x00", b"%s: %s;", b"%s: \x0b%s"),
            *(b"%s %s", b"%s: %s\r\n folded", b"%s:\r\n %s", b"%s:\r\n\t%s\r\n "),
            *(b"X: y\r\n %s: %s",),
            *(b"X: y\r\n%s: %s", b"X y: z\r\n%s: %s", b": z\r\n%s: %s", b"X: y\n%s: %s\n"),
        ):
            for spelling in (name, name.lower(), name.upper()):
                yield from plain(
                    with_header(form % (spelling, value), body=b"2\r\nok\r\n0\r\n\r\n")
                )


def header_values(chance: random.Random) -> Iterator[Case]:
    for byte in BYTES:
        yield from plain(with_header(b"X: a" + byte + b"b\r\nContent-Length: 2"))
    lines = [
        *(b"", b" ", b"\t", b":", b" :", b"X", b"X:", b"X:y", b"X: y", b"X : y", b" X: y"),
        *(b"\tX: y",),
        *(b"X: y\r\n z", b"X: y\r\n\tz", b"X: y\r\n ", b"X: y\r\n \r\n z", b"X: y\n z", b"X y"),
        *(b"X: y\r", b"X: \ry", b"\rX: y", b"X\r: y", b"X: y\x00", b"X: y\r\n\x00"),
        *(b"X: y\r\n\rz: 1",),
        *(b"Bad Header: 1", b"Bad Header : 1", b"a b c: d\r\n e", b"X: y\r\n z: \x01", b"(): x"),
        *(b"\xc3\xa9: x", b"X: \xc3\xa9", b"X: \xff", b'X: "y', b"X\\: y", b"X: y\r\n\x0bz: 1"),
    ]
    for line in lines:
        for place in (
            b"%s\r\nContent-Length: 2",
            b"Content-Length: 2\r\n%s",
            b"A: b\r\n%s\r\nC: d",
        ):
            yield from plain(with_header(place % line))
    for first, second in itertools.permutations(lines[4:], 2):
        if chance.random() < 0.12:
            yield from plain(with_header(first + b"\r\n" + second + b"\r\nContent-Length: 2"))
    for size in (1000, 4070, 4096, 5000, 8192, 60_000):
        yield from plain(with_header(b"X: " + b"y" * size + b"\r\nContent-Length: 2"))
        yield from plain(with_header(b"X" * size + b": y\r\nContent-Length: 2"))
        yield from plain(with_header(b"X: \x01" + b"y" * size))
    for count in (100, 5000):
        yield from plain(with_header(b"X: y\r\n" * count + b"Content-Length: 2"))
        yield from plain(with_header(b"X:\r\n y\r\n" * count + b"Content-Length: 2"))


def lengths(chance: random.Random) -> Iterator[Case]:
    values = [
        *(b"", b" ", b"0", b"00", b"1", b"2", b"3", b"+2", b"-2", b"-0", b"2 ", b"\t2", b"02"),
        *(b"2.0",),
        *(b"0x2", b"2,2", b"2, 2", b"2 2", b"2_0", b"1e1", b"two", b"\xb2", b"\xd9\xa2", b"2\x0b"),
        *(b"9223372036854775807", b"9223372036854775808", b"18446744073709551618", b"9" * 400),
        *(b"0" * 400 + b"2", b"10240", b"10241", b"2;", b'"2"', b"2\\"),
    ]
    for value in values:
        for status in (b"200 OK", b"204 No", b"304 Not", b"500 Ill", b"103 Early"):
            yield from plain(with_header(b"Content-Length: " + value, status))
        yield from plain(
            with_header(
                b"Content-Length: %s\r\nTransfer-Encoding: chunked" % value, body=b"0\r\n\r\n"
            )
        )
    for first, second in itertools.product(values[:16], values[:12]):
        if chance.random() < 0.6:
            pair = b"Content-Length: %s\r\nContent-Length: %s" % (first, second)
            yield from plain(with_header(pair, chance.choice([b"200 OK", b"204 No", b"101 Up"])))
    for count in (3, 20):
        yield from plain(with_header(b"\r\n".join([b"Content-Length: 2"] * count)))
        yield from plain(
            with_header(b"\r\n".join([b"Content-Length: 2"] * count + [b"content-length: 3"]))
        )


def encodings(chance: random.Random) -> Iterator[Case]:
    values = [
        *(b"chunked", b"Chunked", b"CHUNKED", b" chunked ", b"chunked;q=1", b"chunked,", b"", b" "),
        *(b"gzip", b"identity", b"gzip, chunked", b"chunked, gzip", b"chunked, chunked", b"chunke"),
        *(b"\xc3\xa7hunked", b"chun\xe2\x84\xaaed", b"x\\y", b'"chunked"', b"\x0bchunked", b"\x01"),
    ]
    for version, value in itertools.product((b"1.1", b"1.0", b"0.9", b"0.0", b"2.0"), values):
        head = b"HTTP/%s 200 OK\r\nTransfer-Encoding: %s\r\n\r\n" % (version, value)
        yield from plain(head + b"2\r\nok\r\n0\r\n\r\n")
    for first, second in itertools.product(values[:8], values[:8]):
        head = b"Transfer-Encoding: %s\r\nTransfer-Encoding: %s" % (first, second)
        yield from plain(with_header(head, body=b"2\r\nok\r\n0\r\n\r\n"))
    for status in (b"101 Up", b"103 Early", b"204 No", b"304 Not", b"500 Ill"):
        for value in values[:10]:
            yield from plain(
                with_header(b"Transfer-Encoding: " + value, status, b"2\r\nok\r\n0\r\n\r\n")
            )
    for connection in (b"close", b"keep-alive", b"Upgrade", b"x, upgrade", b"Close, Keep-Alive"):
        for version, status in itertools.product(
            (b"1.1", b"1.0"), (b"200 OK", b"101 Up", b"204 No")
        ):
            head = b"HTTP/%s %s\r\nConnection: %s\r\nUpgrade: x\r\n" % (version, status, connection)
            yield from plain(head + b"\r\nok", head + b"Content-Length: 2\r\n\r\nok and more")
    for value in (b"gzip", b"deflate", b"br", b"identity", b"x\x01"):
        yield from plain(
            with_header(
                b"Content-Encoding: %s\r\nContent-Length: 4" % value, body=b"\x1f\x8b\x08\x00"
            )
        )
    for value in (
        b"X",
        b"X, Y",
        b"Content-Length",
        b"X,transfer-encoding",
        b", trailer ,",
        b"",
        b"a b",
    ):
        for name in (b"Trailer", b"trailer"):
            lines = b"Transfer-Encoding: chunked\r\n%s: %s" % (name, value)
            yield from plain(with_header(lines, body=b"0\r\nX: y\r\n\r\n"))
            yield from plain(with_header(b"%s: %s\r\nContent-Length: 2" % (name, value)))


def informational(chance: random.Random) -> Iterator[Case]:
    pieces = [
        *(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n", b"\r\n"),
        *(b"HTTP/1.0 102 P\r\n\r\n", b"HTTP/1.1 100\r\nContent-Length: 3\r\n\r\n"),
        *(b"HTTP/1.1 199 X\n\n",),
        *(b"HTTP/1.1 101 Up\r\n\r\n", b"HTTP/1.1 100 C\r\nBad\r\n\r\n"),
        *(b"HTTP/1.1 100 C\r\n\r\nabc",),
        *(b"HTTP/1.1 103 E\r\nContent-Length: x\r\n\r\n",),
        *(b"HTTP/1.1 103 E\r\nLocation: /x\r\n\r\n",),
    ]
    for piece in pieces:
        for count in (1, 2, 5, 6, 12, 100):
            yield from plain(piece * count + OK, piece * count)
    for _ in range(60):
        yield from plain(b"".join(chance.choices(pieces[:6], k=chance.randrange(2, 9))) + OK)
