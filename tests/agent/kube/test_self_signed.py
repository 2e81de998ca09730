"""A certificate that is its own authority: what is in it, and when it is accepted."""

import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from agent.kube import self_signed
from agent.kube.self_signed import KeyPair

NOW = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
SECOND, HOUR, DAY = (datetime.timedelta(seconds=seconds) for seconds in (1, 3600, 86400))
NAMES = ["a.svc", "a"]


@pytest.fixture(scope="module")
def made() -> KeyPair:
    return self_signed.certificate("podgate", NAMES, NOW, DAY)


def test_certificate_is_for_servers_of_these_names_and_signs_no_other(made: KeyPair) -> None:
    found = x509.load_pem_x509_certificate(made.certificate)
    names = x509.SubjectAlternativeName([x509.DNSName(name) for name in NAMES])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    assert [(one.value, one.critical) for one in found.extensions] == [
        (names, False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (usage, False),
    ]
    assert found.subject.rfc4514_string() == found.issuer.rfc4514_string() == "CN=podgate"
    found.verify_directly_issued_by(found)
    made.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def test_certificate_is_valid_from_an_hour_before_to_its_end(made: KeyPair) -> None:
    """Clocks of clients may be behind."""
    assert (made.valid_from, made.made, made.expires) == (NOW - HOUR, NOW, NOW + DAY)
    times = (NOW - HOUR - SECOND, NOW - HOUR, NOW + DAY - SECOND, NOW + DAY)
    assert [made.is_valid(time) for time in times] == [False, True, True, False]


@pytest.mark.parametrize(
    ("names", "is_for"), [(NAMES, True), (["a", "a.svc"], False), (["a.svc"], False), ([], False)]
)
def test_certificate_is_for_its_names_in_order(
    made: KeyPair, names: list[str], *, is_for: bool
) -> None:
    assert made.is_for(names) is is_for


def test_key_of_another_certificate_is_an_error(made: KeyPair) -> None:
    made.check()
    other = self_signed.certificate("podgate", NAMES, NOW, DAY)
    assert other != made
    with pytest.raises(ValueError, match="the key is not the certificate's"):
        KeyPair(made.certificate, other.key).check()
