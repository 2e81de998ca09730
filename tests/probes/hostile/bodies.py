"""Hostile bodies and chunks, answers that break off, and mutations of good ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from tests.probes.hostile.answers import CHUNKED, ILL, OK, Answer, Case, plain, with_header


def chunks(chance: random.Random) -> Iterator[Case]:
    sizes = [
        *(b"2", b"02", b"2 ", b"2\t", b" 2", b"2;x", b"2;x=y", b'2;x="a;b"', b"2 ; ext", b"2 ;"),
        *(b"2; ",),
        *(b";", b"", b" ", b"+2", b"-2", b"0x2", b"2h", b"g", b"2\r", b"\r2", b"2\x00"),
        *(b"2;\x00\xff",),
        *(b"0" * 15 + b"2", b"0" * 16 + b"2", b"0" * 17 + b"2", b"f" * 16, b"f" * 17, b"g" * 17),
        *(b"4" + b"0" * 15, b"7" + b"f" * 15, b"8" + b"0" * 15, b"c" + b"0" * 15, b"2,", b"2:"),
        *(b"2 2",),
        *(b"2;" + b"x" * 4000, b"2;" + b"x" * 4090, b"2;" + b"x" * 4094, b"2;" + b"x" * 5000),
    ]
    for size in sizes:
        for ending in (b"\r\n", b"\n", b"\r\r\n", b"\r", b"\n\r"):
            yield from plain(CHUNKED + size + ending + b"ok\r\n0\r\n\r\n")
        yield from plain(CHUNKED + b"1\r\na\r\n" + size + b"\r\nok\r\n0\r\n\r\n", CHUNKED + size)
        yield from plain(CHUNKED.replace(b"200", b"500") + size + b"\r\nok\r\n0\r\n\r\n")
    for ending in (b"\r\n", b"\n", b"\r", b"\n\n", b"xx", b"x", b"", b"\r\r\n", b"\rx"):
        for rest in (b"0\r\n\r\n", b"1\r\na\r\n0\r\n\r\n", b""):
            yield from plain(CHUNKED + b"2\r\nok" + ending + rest)
    trailers = [
        *(b"\r\n", b"\n", b"\n\r\n", b"\r", b"", b"X: y\r\n\r\n", b"X: y\n\n", b"X: y\r\n"),
        *(b"X: y",),
        *(b"X: y\n\r\n", b"X y\r\n\r\n", b" X: y\r\n\r\n", b"X : y\r\n\r\n", b"X: \x00\r\n\r\n"),
        *(b"a",),
        *(b"X: y\r\n z\r\n\r\n", b"\x00\r\n\r\n", b": y\r\n\r\n", b"X: y\n\nZ\r\n\r\n"),
        *(b"\n\n\r\n\r\n",),
        *(b"Content-Length: 9\r\n\r\n", b"X: " + b"y" * 4080 + b"\r\n\r\n", b"\rX: y\r\n\r\n"),
        *(b"\xff\r\n\r\n",),
        *(b"X: " + b"y" * 4089 + b"\r\n\r\n", b"X: " + b"y" * 4090 + b"\r\n\r\n"),
        *(b"X: y\r\n" * 1000,),
    ]
    for trailer, status in itertools.product(trailers, (b"200", b"302", b"500")):
        yield from plain(CHUNKED.replace(b"200", status) + b"2\r\nok\r\n0\r\n" + trailer)
    for _ in range(300):
        body = b""
        for _ in range(chance.randrange(1, 5)):
            data = b"d" * chance.choice([0, 1, 2, 9, 30])
            size = b"%x" % len(data)
            if chance.random() < 0.2:
                size = chance.choice(sizes)
            line = chance.choice([b"\r\n"] * 12 + [b"\n", b"\r", b"", b" \r\n"])
            body += size + line + data + chance.choice([b"\r\n"] * 12 + [b"\n", b"x", b""])
        yield from plain(CHUNKED + body + chance.choice([b"0\r\n\r\n", b"0\r\n", b"0", b""]))
    for count in (900, 2000, 6000):
        for chunk in (
            b"1\r\na\r\n",
            b"1;aaaaaaaaaaaaaaaaaaaa\r\na\r\n",
            b"000000000000001\r\na\r\n",
        ):
            yield from plain(CHUNKED + chunk * count + b"0\r\n\r\n")


def bodies(chance: random.Random) -> Iterator[Case]:
    for size in (0, 1, 2047, 2048, 4096, 10_239, 10_240, 10_241, 20_000, 200_000):
        for declared in (size, size + 1, max(0, size - 1)):
            for status in (b"200 OK", b"302 F", b"500 Ill"):
                yield from plain(with_header(b"Content-Length: %d" % declared, status, b"b" * size))
        yield from plain(
            with_header(b"X: y", body=b"b" * size), with_header(b"X: y", b"500 Ill", b"b" * size)
        )
        yield from plain(CHUNKED + b"%x\r\n" % size + b"b" * size + b"\r\n")
    for text in (
        b"caf\xc3\xa9",
        b"\xff\xfe",
        b"\x00\x01",
        b"<&>\xe2\x80\xa8",
        b"\xed\xa0\x80",
        b"\xe2\x82",
    ):
        for status in (b"200 OK", b"302 F", b"500 Ill"):
            yield from plain(with_header(b"X: y", status, text))


def endings(chance: random.Random) -> Iterator[Case]:
    """Good answers that end at each byte."""
    answers = [
        b"HTTP/1.1 200 OK\r\nX: y\r\n z\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 500 Ill\nTransfer-Encoding: chunked\n\n2;x\r\nok\r\n0\r\nT: u\r\n\r\n",
        b"HTTP/1.1 103 E\r\n\r\nHTTP/1.0 302 F\r\nLocation: /x\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX y\r\n: b\r\n\r\n",
    ]
    for answer in answers:
        for at in range(len(answer)):
            yield from plain(answer[:at])
            yield from plain(answer[:at], end="reset")
            if at % 6 == 0:
                yield from plain(answer[:at], end="hold")
    yield from plain(*answers, OK, end="reset")
    yield from plain(OK, ILL, b"junk\r\n", b"HTTP/1.1 20", CHUNKED + b"x\r\n", b"junk", end="hold")


def mutations(chance: random.Random) -> Iterator[Case]:
    """Good answers with bytes replaced, removed and inserted."""
    answers = [
        OK,
        ILL,
        CHUNKED + b"5;ext=1\r\nhello\r\n3\r\nabc\r\n0\r\nTrailer: t\r\n\r\n",
        b"HTTP/1.0 200 Fine\r\nServer: x/1.0 (y)\r\nX-Folded: a\r\n b\r\n"
        b"Connection: close\r\n\r\nhello",
        b"HTTP/1.1 302 Found\r\nLocation: /other?x=1\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 103 E\r\nLink: <x>\r\n\r\nHTTP/1.1 204 No Content\r\nDate: now\r\n\r\n",
    ]
    odd = [*b'\r\n \t:;,\x00\x01\x7f\x80\xff/.%#?0123456789abcxyzABC+-_"\\']
    for _ in range(900):
        data = bytearray(chance.choice(answers))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.choice(odd)
                case 1:
                    del data[at : at + chance.choice([1, 1, 1, 2, 5])]
                case _:
                    data[at:at] = bytes(chance.choices(odd, k=chance.choice([1, 1, 2, 3])))
        yield Case((Answer(bytes(data)), Answer(OK)))
