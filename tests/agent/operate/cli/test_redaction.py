"""Secrets in text that leaves the node."""

import time

import pytest

from agent.operate.cli.redaction import LEFT_OUT, redact

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW06YWdlbnQifQ.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'"error":"401 for {TOKEN}"', f'"error":"401 for {LEFT_OUT}"'),
        ("Authorization: Bearer abc123", f"Authorization: Bearer {LEFT_OUT}"),
        ('"authorization": "Basic dXNlcjpw"', f'"authorization": "Basic {LEFT_OUT}"'),
        ("sent bearer abc.123= to x", f"sent bearer {LEFT_OUT} to x"),
        ("https://me:hunter2@198.18.0.1/x", f"https://{LEFT_OUT}198.18.0.1/x"),
        ("DB_PASSWORD=hunter2 rest", f"DB_PASSWORD={LEFT_OUT} rest"),
        ('{"apiToken": "a b\\"c", "n": 1}', f'{{"apiToken": {LEFT_OUT}, "n": 1}}'),
        ("client-key-data: LS0tLS1=", f"client-key-data: {LEFT_OUT}"),
        (
            "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nb",
            f"a\n{LEFT_OUT}\nb",
        ),
        ("meta priority 4ac3:6b30 accept", f"meta priority {LEFT_OUT} accept"),
    ],
)
def test_secret_is_replaced(text: str, expected: str) -> None:
    assert redact(text) == (expected, 1)


def test_secrets_of_all_kinds_are_counted_together() -> None:
    text = f"{TOKEN} {TOKEN} token=a password: b bearer x, c://d:e@f key=token"
    assert redact(text) == (
        f"{LEFT_OUT} {LEFT_OUT} token={LEFT_OUT} password: {LEFT_OUT} bearer {LEFT_OUT}, "
        f"c://{LEFT_OUT}f key=token",
        6,
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"pod":"token-review","port":8080}',
        "kube-system/secret-store connects to http://198.18.0.1:80/",
        "cgroup /system.slice/passwd.service",
        "meta priority set none counter accept",
        "priority=1",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == (text, 0)


@pytest.mark.parametrize(
    "unit",
    [
        # Words with dots, of which the end may be a secret's name; and the same of each pattern.
        "a." * 2048 + " ",
        "eyJ-",
        "eyJhbGciOi.",
        "token=",
        'token="',
        "token=\\",
        "token ",
        "https.",
        "://a",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN A",
        "-----END ",
        "authorization:",
        "authorization: a",
        "bearer ",
        "meta priority 1",
        "\t",
    ],
)
def test_text_of_a_megabyte_is_read_in_seconds(unit: str) -> None:
    """By CPU time: quadratic patterns took a minute for a fifth of it."""
    text = unit * ((1 << 20) // len(unit))
    before = time.process_time()
    redact(text)
    assert time.process_time() - before < 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("url=token=abc", f"url=token={LEFT_OUT}"),
        (f"a.{TOKEN}", f"a.{LEFT_OUT}"),
        (f"x-{TOKEN}", f"x-{LEFT_OUT}"),
        ("my.db-password.txt: hunter2, next", f"my.db-password.txt: {LEFT_OUT}, next"),
    ],
)
def test_secret_inside_other_text_is_replaced(text: str, expected: str) -> None:
    assert redact(text) == (expected, 1)
