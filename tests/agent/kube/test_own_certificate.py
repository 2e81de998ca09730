"""The certificate of a port whose clients trust none."""

import ssl
import sys

import pytest

from agent.kube import own_certificate, self_signed


def test_each_one_is_new_and_loads_with_its_key() -> None:
    first, second = own_certificate.make(), own_certificate.make()
    assert first != second
    pair = self_signed.KeyPair(first, first)
    pair.check()
    assert pair.is_for(["podgate"])
    own_certificate.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), first)


def test_process_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="the process that makes a certificate failed"):
        own_certificate.make()
