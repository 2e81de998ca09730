"""URLs are read, escaped and resolved as by Go's net/url."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.spec import urls


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("", "/"),
        ("/", "/"),
        ("healthz", "healthz"),
        ("/a/b?c=d&e", "/a/b?c=d&e"),
        ("/a?", "/a?"),
        ("?q", "/?q"),
        ("/a?b?c", "/a?b?c"),
        ("/a#fragment", "/a"),
        ("/a b", "/a%20b"),
        ("/a%20b", "/a%20b"),
        ("/a%2Fb", "/a%2Fb"),
        ("/a%2fb c", "/a/b%20c"),  # Go escapes again once anything needs it
        ("/[x]!*'()", "/[x]!*'()"),
        ('/"<>\\^`{|}', "/%22%3C%3E%5C%5E%60%7B%7C%7D"),
        ("//other:81/x", "/x"),
        ("///x", "///x"),
        ("http://other/x", "/x"),
        ("http://other", "/"),
    ],
)
def test_request_target(text: str, target: str) -> None:
    assert urls.parse(text).request_target == target


def test_text_beyond_ascii_is_sent_as_escaped_utf8() -> None:
    assert urls.parse(urls.to_bytes_text("/é")).request_target == "/%C3%A9"


def test_lone_surrogate_becomes_the_replacement_character() -> None:
    assert urls.parse(urls.to_bytes_text("/\ud800")).request_target == "/%EF%BF%BD"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/%zz", 'invalid URL escape "%zz"'),
        ("/%zzz", 'invalid URL escape "%zz"'),
        ("/%2", 'invalid URL escape "%2"'),
        ("/a\nb", "invalid control character"),
        ("/a\x7f", "invalid control character"),
        ("1a:b", "first path segment"),
        (":a", "missing protocol scheme"),
        ("//[::1", "missing ']'"),
        ("//h:x/", "invalid port"),
        ("//a b/", 'invalid character " " in host name'),
        ("//a\\b@h/", "invalid userinfo"),
        ("//a[::1]/", 'parse "//a[::1]/": invalid IP-literal'),
        ("//[1.2.3.4]/", 'parse "//[1.2.3.4]/": invalid IP-literal'),
        ("//[x]/", 'parse "//[x]/": invalid host: ParseAddr("x"): unable to parse IP'),
        ("//[::1]x/", 'parse "//[::1]x/": invalid port "x" after host'),
        ("http://:x/", 'invalid port ":x" after host'),
        ("http://h:1:2/", 'invalid port ":1:2" after host'),
        ("//%41/", 'invalid URL escape "%41"'),
        ("//a b%41/", 'invalid character " " in host name'),
        ("//%41 b/", 'invalid URL escape "%41"'),
        ("//[fe80::1%25a%5Eb]/", 'invalid URL escape "%5E"'),
        ("//[fe80::1%25]/", 'ParseAddr("fe80::1%"): zone must be a non-empty string'),
        ("//[1.2.3.4%25a]/", 'invalid host: ParseAddr("1.2.3.4%a")'),
        ("//[x%25a]/", 'invalid host: ParseAddr("x%a"): unable to parse IP'),
    ],
)
def test_what_go_rejects_is_rejected(text: str, words: str) -> None:
    with pytest.raises(urls.UrlError) as caught:
        urls.parse(text)
    assert words in str(caught.value)


def test_bad_path_can_be_kept_as_is() -> None:
    assert urls.escape_path("/%zz?a b\n") == "/%25zz%3Fa%20b%0A"


@pytest.mark.parametrize(
    ("text", "hostname", "port"),
    [
        ("http://h/", "h", 80),
        ("https://h/", "h", 443),
        ("http://h:81/", "h", 81),
        ("http://h:/", "h", 80),
        ("http://[fd00::1]:81/", "fd00::1", 81),
        ("http://[fd00::1]/", "fd00::1", 80),
        ("http://user:secret@h:81/", "h", 81),
        ("http://h:99999/", "h", -1),
        ("http://h:000081/", "h", 81),
        ("http://h:0/", "h", 0),
        ("http://h:" + "9" * 5000, "h", -1),
        ("mailto:a@h", "", 80),
        ("http://h:65535/", "h", 65535),
        ("http://h:65536/", "h", -1),
        ("http://h:100000/", "h", -1),
        ("http://[fd00::1%25eth0]:81/", "fd00::1%eth0", 81),
        ("http://[fd00::1%25a%25b]:81/", "fd00::1%a%b", 81),
    ],
)
def test_host_and_port(text: str, hostname: str, port: int) -> None:
    url = urls.parse(text)
    assert (url.hostname, url.port) == (hostname, port)


@pytest.mark.parametrize(
    ("reference", "resolved"),
    [
        ("/x", "http://h:80/x"),
        ("x", "http://h:80/a/x"),
        ("?y", "http://h:80/a/b?y"),
        ("", "http://h:80/a/b?q"),
        ("../x", "http://h:80/x"),
        ("../../../x", "http://h:80/x"),
        ("./x/.", "http://h:80/a/x/"),
        ("/x/..", "http://h:80/"),
        ("//other/x", "http://other/x"),
        ("https://h:443/x/../y", "https://h:443/y"),
        ("http://h", "http://h"),
        ("mailto:x", "mailto:x"),
        ("//u:p@h/x", "http://u:p@h/x"),
        ("?", "http://h:80/a/b?"),
        ("#f", "http://h:80/a/b?q#f"),
        ("x/..", "http://h:80/a/"),
        ("x/./y", "http://h:80/a/x/y"),
        ("..", "http://h:80/"),
        (".", "http://h:80/a/"),
    ],
)
def test_reference_is_resolved(reference: str, resolved: str) -> None:
    base = urls.parse("http://h:80/a/b?q")
    assert str(urls.resolve(base, urls.parse(reference))) == resolved


@given(st.text(st.characters(max_codepoint=255)))
def test_no_text_makes_a_request_line_of_two(text: str) -> None:
    try:
        target = urls.parse(text).request_target
    except urls.UrlError:
        target = urls.escape_path(text)
    assert not set(target) & {"\r", "\n", "\0"}
    assert set(target.partition("?")[0]) <= {chr(code) for code in range(0x21, 0x7F)}


@given(st.text(st.characters(max_codepoint=255)), st.text(st.characters(max_codepoint=255)))
def test_what_was_parsed_parses_again(base: str, reference: str) -> None:
    try:
        url = urls.resolve(urls.parse("http://h/" + base), urls.parse(reference))
    except urls.UrlError:
        return
    assert urls.parse(str(url)).request_target == url.request_target


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (urls.Url(scheme="http", host="a:81", path="x", query="q"), "http://a:81/x?q"),
        (urls.Url(scheme="http", host="a", path="/x", fragment="f"), "http://a/x#f"),
        (urls.Url(scheme="http", host="a"), "http://a"),
        (urls.Url(path="x"), "x"),
        (urls.Url(host="a", user="u", path="x"), "//u@a/x"),
        (urls.Url(scheme="mailto", opaque="a@b"), "mailto:a@b"),
    ],
)
def test_text_of_a_url_separates_host_and_path(url: urls.Url, text: str) -> None:
    assert str(url) == text
