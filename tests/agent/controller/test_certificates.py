"""The webhook's certificate: trusted before it is served, renewed before it expires."""

import base64
import datetime
import json

import pytest

from agent.controller import certificates
from agent.controller.certificates import LIFETIME, RENEWED_BEFORE, TRUSTED_BEFORE, Certificates

NAMES = ["podgate-controller.podgate.svc", "podgate-controller.podgate"]
START = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
MINUTE = datetime.timedelta(minutes=1)


def _first() -> Certificates:
    made = certificates.following(None, NAMES, START)
    assert made is not None
    return made


def test_first_certificate_is_for_the_service_and_trusted() -> None:
    made = _first()
    assert made.serving.is_for(NAMES)
    assert made.trusted == made.serving.certificate
    assert made.serving.expires == START + LIFETIME
    assert certificates.following(made, NAMES, START + LIFETIME - RENEWED_BEFORE - MINUTE) is None


def test_every_certificate_that_is_served_was_trusted_before() -> None:
    """Two years, a pass every six hours: the API server has the trust of the pass before."""
    current = _first()
    served = {current.serving.certificate}
    now = START
    while now < START + datetime.timedelta(days=730):
        now += datetime.timedelta(hours=6)
        assert now < current.serving.expires
        trusted_before = current.trusted
        current = certificates.following(current, NAMES, now) or current
        assert current.serving.certificate in trusted_before
        # A replica that has not read the Secret for a while serves the previous one.
        served.add(current.serving.certificate)
    assert len(served) == 13


def test_new_certificate_is_not_served_before_api_servers_read_the_trust() -> None:
    due = START + LIFETIME - RENEWED_BEFORE + MINUTE
    prepared = certificates.following(_first(), NAMES, due)
    assert prepared is not None
    assert prepared.next is not None
    assert certificates.following(prepared, NAMES, due + TRUSTED_BEFORE - MINUTE) is None
    served = certificates.following(prepared, NAMES, due + TRUSTED_BEFORE)
    assert served is not None
    assert served.serving == prepared.next
    assert prepared.serving.certificate in served.trusted


@pytest.mark.parametrize("change", ["expired", "other names"])
def test_certificate_that_cannot_be_used_is_replaced_at_once(change: str) -> None:
    names = ["podgate-controller.other.svc"] if change == "other names" else NAMES
    now = START + (LIFETIME if change == "expired" else MINUTE)
    made = _first()
    replaced = certificates.following(made, names, now)
    assert replaced is not None
    assert replaced.serving != made.serving
    assert replaced.serving.is_for(names)


def test_secret_is_read_as_it_was_written() -> None:
    made = _first()
    due = START + LIFETIME - RENEWED_BEFORE + MINUTE
    for one in (made, certificates.following(made, NAMES, due)):
        assert one is not None
        body = {"data": certificates.secret(one), "kind": "Secret"}
        assert certificates.read(json.dumps(body).encode()) == one


@pytest.mark.parametrize(
    "change",
    [
        {"tls.key": ""},
        {"tls.crt": "bm8="},
        {"tls.key": "bm8="},
        {"tls.crt": "%"},
        {"next.crt": "x"},
    ],
)
def test_damaged_secret_is_not_used(change: dict[str, str]) -> None:
    body = {"data": certificates.secret(_first()) | change}
    assert certificates.read(json.dumps(body).encode()) is None


def test_key_of_another_certificate_is_not_used() -> None:
    other = certificates.secret(_first())["tls.key"]
    body = {"data": certificates.secret(_first()) | {"tls.key": other}}
    assert certificates.read(json.dumps(body).encode()) is None


def test_secret_without_data_is_not_used() -> None:
    assert certificates.read(b'{"kind": "Secret", "metadata": {"name": "x"}}') is None
    assert base64.b64decode(certificates.secret(_first())["next.crt"]) == b""


def test_certificate_of_a_leader_whose_clock_was_ahead_is_replaced() -> None:
    ahead = certificates.following(None, NAMES, START + datetime.timedelta(days=100))
    made = certificates.following(ahead, NAMES, START)
    assert made is not None
    assert made.serving.is_valid(START)
    assert made.trusted == made.serving.certificate


def test_next_certificate_of_a_leader_whose_clock_was_ahead_is_never_served() -> None:
    first = _first()
    ahead = START + LIFETIME - RENEWED_BEFORE + MINUTE
    prepared = certificates.following(first, NAMES, ahead)
    assert prepared is not None
    assert prepared.next is not None
    dropped = certificates.following(prepared, NAMES, START)
    assert dropped == first
