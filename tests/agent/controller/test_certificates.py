"""The webhook's certificate: which one an installation keeps, and what clients trust."""

import datetime
import json

import pytest

from agent.controller import certificates
from agent.controller.certificates import LIFETIME, REPLACED_AFTER, Certificates
from agent.kube import self_signed

NAMES = certificates.service_names("podgate")
START = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
MINUTE = datetime.timedelta(minutes=1)
DAY = datetime.timedelta(days=1)


def _of_previous_version() -> Certificates:
    """Controllers up to 0.1 made them for 90 days."""
    pair = self_signed.certificate("podgate-controller", NAMES, START, 90 * DAY)
    return Certificates(pair, pair.certificate)


def test_first_certificate_is_for_the_service_and_trusted() -> None:
    made = certificates.following(None, NAMES, START)
    assert made.serving.is_for(NAMES)
    assert made.trusted == made.serving.certificate
    assert made.serving.expires == START + LIFETIME


def test_certificate_is_kept_for_a_year() -> None:
    made = certificates.following(None, NAMES, START)
    assert certificates.following(made, NAMES, START + REPLACED_AFTER - MINUTE) is made
    assert certificates.following(made, NAMES, START + REPLACED_AFTER) != made


@pytest.mark.parametrize("earlier", ["year", "version"])
def test_replaced_certificate_stays_trusted_while_replicas_serve_it(earlier: str) -> None:
    is_year = earlier == "year"
    found = certificates.following(None, NAMES, START) if is_year else _of_previous_version()
    replaced = certificates.following(found, NAMES, START + (REPLACED_AFTER if is_year else DAY))
    assert replaced.serving != found.serving
    assert found.serving.certificate in replaced.trusted
    assert replaced.serving.certificate in replaced.trusted


@pytest.mark.parametrize(("left", "is_kept"), [(MINUTE, True), (0 * MINUTE, False)])
def test_certificate_is_kept_while_half_of_a_lifetime_is_left(
    left: datetime.timedelta, *, is_kept: bool
) -> None:
    pair = self_signed.certificate("podgate-controller", NAMES, START, LIFETIME / 2 + DAY)
    found = Certificates(pair, pair.certificate)
    assert (certificates.following(found, NAMES, START + DAY - left) is found) is is_kept


@pytest.mark.parametrize("problem", ["expired", "of the future", "other names"])
def test_certificate_that_cannot_be_used_is_replaced_and_not_trusted(problem: str) -> None:
    names = ["podgate-controller.other.svc"] if problem == "other names" else NAMES
    now = {
        "expired": START + LIFETIME,
        # The clock of the machine that made it was ahead.
        "of the future": START - 100 * DAY,
        "other names": START + MINUTE,
    }[problem]
    made = certificates.following(None, NAMES, START)
    replaced = certificates.following(made, names, now)
    assert replaced.serving != made.serving
    assert replaced.serving.is_for(names)
    assert replaced.serving.is_valid(now)
    assert replaced.trusted == replaced.serving.certificate


def test_certificate_without_names_is_not_for_the_service() -> None:
    assert not self_signed.certificate("x", [], START, DAY).is_for(NAMES)


def test_secret_is_read_as_it_was_written() -> None:
    made = certificates.following(_of_previous_version(), NAMES, START)
    body = {"data": certificates.secret(made), "kind": "Secret"}
    assert certificates.read(json.dumps(body).encode()) == made


def test_secret_of_a_previous_version_is_trusted_as_it_is_served() -> None:
    found = _of_previous_version()
    data = certificates.secret(found)
    del data["ca.crt"]
    assert certificates.read(json.dumps({"data": data}).encode()) == found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"data": {}}',
        b'{"data": {"tls.crt": "", "tls.key": ""}}',
        b'{"data": {"tls.crt": "AAAA", "tls.key": "AAAA"}}',
        b'{"data": {"tls.crt": "%", "tls.key": "%"}}',
    ],
)
def test_secret_that_has_no_certificate_is_not_usable(content: bytes) -> None:
    assert certificates.read(content) is None


def test_key_of_another_certificate_is_not_usable() -> None:
    one, other = (certificates.following(None, NAMES, START) for _ in range(2))
    data = certificates.secret(one) | {"tls.key": certificates.secret(other)["tls.key"]}
    assert certificates.read(json.dumps({"data": data}).encode()) is None
