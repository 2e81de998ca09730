"""Client certificates of https and grpc probes (mutual TLS), and what makes one unusable.

A certificate that is missing, expired or rejected proves nothing about the pod, so such a probe has
no result: no threshold counts it, and an answered probe is proxied.
"""

import contextlib
import datetime
import os
import ssl
import time
from collections.abc import Iterable, Mapping

import msgspec

from probes.errors import ProbeError
from probes.protocols import tls
from probes.results import ExchangeResult, ProbeResult
from probes.spec.definitions import CertificateName, ContainerProbes, Grpc, Handler, HttpGet

ENDS_SOON = 0.1
"""Part of its life in which a certificate should have been replaced: those that renew them do so
after two thirds (cert-manager) or half (SPIRE)."""

_ALPNS = (("http/1.1",), ("h2",))

_CONTEXTS_MAX = 8
"""One for each protocol and bundle that is used with the certificate."""


class CertificateError(ProbeError):
    """A certificate, its key or authorities cannot be used; a sentence without its full stop."""


class ClientCertificate:
    """A certificate chain and its private key, which nothing prints, logs or saves."""

    __slots__ = ("_contexts", "_pair", "authorities", "not_after", "not_before")

    def __init__(self, certificate: bytes, key: bytes, authorities: bytes = b"") -> None:
        """All in PEM. authorities: those that may have issued a server's certificate, or empty.

        Raises `CertificateError`. Takes milliseconds of CPU: for a thread.
        """
        from cryptography import x509  # 40 ms, and only pods with client certificates need it
        from cryptography.hazmat.primitives import serialization

        try:
            leaf = x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise CertificateError("tls.crt has no certificate in PEM that can be read") from error
        try:
            private = serialization.load_pem_private_key(key, None)
        except (ValueError, TypeError):
            # The error's text may quote the content.
            raise CertificateError("tls.key has no readable private key in PEM") from None
        if private.public_key() != leaf.public_key():
            raise CertificateError("tls.key is not the key of tls.crt")
        self._pair = certificate, key
        self._contexts: dict[tuple[tuple[str, ...], str], ssl.SSLContext] = {}
        self.authorities = authorities.decode("ascii", "replace")
        self.not_before = leaf.not_valid_before_utc.timestamp()
        self.not_after = leaf.not_valid_after_utc.timestamp()
        """Unix time in seconds, as the one before."""
        # What http and grpc probes use: this runs in a thread, and probes in the event loop.
        for bundle in {"", self.authorities}:
            for alpn in _ALPNS:
                self.context(alpn, bundle)

    def problem(self, now: float | None = None) -> str:
        """Why no server would accept it now; empty if there is no reason. now: Unix time."""
        now = time.time() if now is None else now
        if now >= self.not_after:
            return f"the client certificate expired at {_utc(self.not_after)}"
        if now < self.not_before:
            return f"the client certificate is not valid before {_utc(self.not_before)}"
        return ""

    def warning(self, now: float) -> str:
        """`problem`, or that it ends soon."""
        if problem := self.problem(now):
            return problem
        if self.not_after - now < ENDS_SOON * (self.not_after - self.not_before):
            return f"the client certificate expires at {_utc(self.not_after)} and is not renewed"
        return ""

    def has_content(self, certificate: bytes, key: bytes, authorities: bytes) -> bool:
        """Whether it was made of these."""
        same = self._pair == (certificate, key)
        return same and self.authorities == authorities.decode("ascii", "replace")

    def context(self, alpn: tuple[str, ...], ca_bundle: str) -> ssl.SSLContext:
        """As `tls.client_context`, with this certificate. Raises `CertificateError`."""
        context = self._contexts.get((alpn, ca_bundle))
        if context is None:
            try:
                context = tls.new_context(alpn, ca_bundle)
                certificate, key = self._pair
                _load(context, certificate, key)
            except (ssl.SSLError, ValueError) as error:
                reason = getattr(error, "reason", None) or "unreadable"
                raise CertificateError(f"OpenSSL rejects the certificate ({reason})") from None
            while len(self._contexts) >= _CONTEXTS_MAX:
                del self._contexts[next(iter(self._contexts))]
            self._contexts[alpn, ca_bundle] = context
        return context


Certificates = Mapping[CertificateName, ClientCertificate | str]
"""A pod's client certificates, by name; for those that cannot be used the reason, a sentence
without its full stop."""
NO_CERTIFICATES: Certificates = {}


def identified(handler: Handler, found: Certificates) -> Handler:
    """The same handler with its client certificate, if it names one. Raises `CertificateError`."""
    if not isinstance(handler, HttpGet | Grpc) or handler.tls is None:
        return handler
    name = handler.tls.certificate
    if name is None:
        return handler
    certificate = found.get(name, f"{name} is not available")
    if isinstance(certificate, str):
        raise CertificateError(certificate)
    policy = msgspec.structs.replace(handler.tls, identity=certificate)
    if name.verifies_server:
        if not certificate.authorities:
            raise CertificateError(f"{name} has no ca.crt to verify the server with")
        policy = msgspec.structs.replace(policy, ca_bundle=certificate.authorities)
    return msgspec.structs.replace(handler, tls=policy)


def certificate_of(handler: Handler) -> ClientCertificate | None:
    """The client certificate of an `identified` handler."""
    policy = handler.tls if isinstance(handler, HttpGet | Grpc) else None
    found = policy.identity if policy else None
    return found if isinstance(found, ClientCertificate) else None


def names_of(containers: Iterable[ContainerProbes]) -> set[CertificateName]:
    """The client certificates that these probes name."""
    probes = (
        probe
        for container in containers
        for probe in (container.startup, container.readiness, container.liveness)
    )
    policies = (
        probe.handler.tls for probe in probes if probe and isinstance(probe.handler, HttpGet | Grpc)
    )
    return {policy.certificate for policy in policies if policy and policy.certificate}


def unusable(text: str) -> ExchangeResult:
    """The result of a probe without a client certificate, or with one that is of no use."""
    text = f"{text[:1].upper()}{text[1:]}, so this shows nothing of the pod."
    return ExchangeResult(ProbeResult.UNKNOWN, text, error=True, lacks_certificate=True)


def rejected(alert: str) -> ExchangeResult:
    """The same, by an alert of the server."""
    return unusable(f"the pod rejects podgate's client certificate ({alert})")


def _load(context: ssl.SSLContext, *parts: bytes) -> None:
    """OpenSSL's interface takes files; these are in memory only."""
    with contextlib.ExitStack() as files:
        paths = []
        for part in parts:
            descriptor = os.memfd_create("podgate-probe-tls", os.MFD_CLOEXEC)
            files.callback(os.close, descriptor)
            os.write(descriptor, part)
            paths.append(f"/proc/self/fd/{descriptor}")
        # An encrypted key would request its password at the terminal.
        context.load_cert_chain(paths[0], paths[1], password="")


def _utc(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
