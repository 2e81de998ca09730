"""Secrets in text that leaves the node."""

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
