"""Probes with client certificates, against real TLS servers that demand one."""

import asyncio
import datetime
import os
import pathlib
import ssl
import time

import pytest

from probes.engine import prober
from probes.protocols import client_certificates, tls
from probes.protocols.client_certificates import CertificateError, ClientCertificate
from probes.results import ExchangeResult, ProbeOutcome, ProbeResult
from probes.spec.definitions import (
    CertificateName,
    ContainerProbes,
    Grpc,
    Handler,
    HttpGet,
    Probe,
    TcpSocket,
    TlsPolicy,
)
from tests.probes.authorities import DAY, Authority, serving
from tests.probes.conftest import Sandbox
from tests.probes.protocols.test_grpc_health import grpcio
from tests.probes.single_probe import ILL, OK

NAME = CertificateName(secret="queue-client")
TLS = TlsPolicy(certificate=NAME)
SECOND = datetime.timedelta(seconds=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def run(
    sandbox: Sandbox, handler: Handler, certificate: ClientCertificate | str
) -> ProbeOutcome:
    plan = prober.plan(
        Probe(handler, timeout_seconds=5.0), (sandbox.v4,), certificates={NAME: certificate}
    )
    running = prober.Prober(asyncio.get_running_loop())
    return await prober.run_once(running, plan, sandbox.netns)


def https(port: int, policy: TlsPolicy = TLS) -> HttpGet:
    return HttpGet(port, scheme="HTTPS", tls=policy)


@pytest.mark.kernel
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_https_server_decides_by_the_client_certificate(
    shared_sandbox: Sandbox, tmp_path: pathlib.Path, authority: Authority, version: ssl.TLSVersion
) -> None:
    context = authority.demanding(tmp_path)
    context.maximum_version = version
    good = ClientCertificate(*authority.issue())
    wrong = ClientCertificate(*Authority("another").issue())
    with serving(shared_sandbox.listen(), context, OK) as port:
        outcome = await run(shared_sandbox, https(port), good)
        assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "ok")
        outcome = await run(shared_sandbox, https(port), wrong)
        assert (outcome.error, outcome.lacks_certificate) == (True, True)
        assert "unknown certificate authority" in outcome.message
        # As for the kubelet: the pod demands something of a probe that has nothing.
        outcome = await run(shared_sandbox, https(port, TlsPolicy("server.test")), good)
        assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, False)


@pytest.mark.kernel
async def test_server_that_is_sick_or_away_fails(
    shared_sandbox: Sandbox, tmp_path: pathlib.Path, authority: Authority
) -> None:
    context = authority.demanding(tmp_path)
    good = ClientCertificate(*authority.issue())
    with serving(shared_sandbox.listen(), context, ILL) as port:
        outcome = await run(shared_sandbox, https(port), good)
        assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, False)
    outcome = await run(shared_sandbox, https(port), good)
    assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, False)


@pytest.mark.kernel
async def test_grpc_server_decides_by_the_client_certificate(
    shared_sandbox: Sandbox, tmp_path: pathlib.Path, authority: Authority
) -> None:
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(authority.certificate)
    files = (*authority.files(tmp_path, "server.test"), trusted)
    handler = Grpc(50053, mode="TLS", tls=TLS)
    good = ClientCertificate(*authority.issue())
    wrong = ClientCertificate(*Authority("another").issue())
    with grpcio(shared_sandbox, "[::]:50053", *files):
        assert (await run(shared_sandbox, handler, good)).result is ProbeResult.SUCCESS
        outcome = await run(shared_sandbox, handler, wrong)
        # gRPC's C core closes without an alert, as a server that is ill may.
        assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, False)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("name", "is_success"), [("server.test", True), ("other.test", False)], ids=["", "other name"]
)
async def test_server_is_verified_by_the_certificate_s_own_authorities(
    shared_sandbox: Sandbox,
    tmp_path: pathlib.Path,
    authority: Authority,
    name: str,
    is_success: bool,
) -> None:
    policy = TlsPolicy(name, certificate=CertificateName(secret="a", verifies_server=True))
    assert policy.certificate
    context = authority.demanding(tmp_path)
    ours = ClientCertificate(*authority.issue(), authority.certificate)
    others = ClientCertificate(*authority.issue(), Authority("another").certificate)
    with serving(shared_sandbox.listen(), context, OK) as port:
        for certificate, passes in ((ours, is_success), (others, False)):
            plan = prober.plan(
                Probe(https(port, policy), timeout_seconds=5.0),
                (shared_sandbox.v4,),
                certificates={policy.certificate: certificate},
            )
            running = prober.Prober(asyncio.get_running_loop())
            outcome = await prober.run_once(running, plan, shared_sandbox.netns)
            assert outcome.passed is passes
            assert not outcome.error


@pytest.mark.kernel
@pytest.mark.parametrize("missing", ["expired", "early", "missing"])
async def test_certificate_of_no_use_is_not_tried(
    shared_sandbox: Sandbox, authority: Authority, missing: str
) -> None:
    certificates: dict[str, ClientCertificate | str] = {
        "expired": ClientCertificate(*authority.issue(ends=-SECOND)),
        "early": ClientCertificate(*authority.issue(begins=DAY)),
        "missing": "the Secret shop/queue-client does not exist",
    }
    listener = shared_sandbox.listen()
    with listener:
        port = listener.getsockname()[1]
        outcome = await run(shared_sandbox, https(port), certificates[missing])
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert (outcome.result, outcome.error) == (ProbeResult.UNKNOWN, True)
    assert outcome.lacks_certificate
    assert outcome.message.endswith(", so this shows nothing of the pod.")


def test_certificate_warns_when_a_tenth_of_its_life_is_left(authority: Authority) -> None:
    made = ClientCertificate(*authority.issue(begins=-DAY, ends=9 * DAY))
    now = time.time()
    assert made.warning(now) == ""
    assert made.warning(now + 7.9 * 86_400) == ""
    assert "expires at" in made.warning(now + 8.1 * 86_400)
    assert "expired at" in made.warning(now + 9.1 * 86_400)


def test_parts_that_cannot_be_used_are_one_sentence_without_their_content(
    authority: Authority,
) -> None:
    certificate, key = authority.issue()
    _, other = authority.issue()
    for parts, text in (
        ((certificate, other), "tls.key is not the key of tls.crt"),
        ((certificate, key[:60]), "tls.key has no readable private key in PEM"),
        ((b"", key), "tls.crt has no certificate in PEM that can be read"),
        ((certificate, key, b"none"), r"OpenSSL rejects the certificate \(unreadable\)"),
    ):
        with pytest.raises(CertificateError, match=text) as caught:
            ClientCertificate(*parts)
        assert "BEGIN" not in str(caught.value)


def test_key_is_in_no_text_of_a_certificate_or_its_plan(authority: Authority) -> None:
    certificate, key = authority.issue()
    made = ClientCertificate(certificate, key)
    plan = prober.plan(Probe(https(1)), ("198.18.0.1",), certificates={NAME: made})
    secret = key.decode().splitlines()[1]
    assert secret not in f"{made!r} {plan!r} {vars(type(made))!r}"


@pytest.mark.parametrize("handler", [https(443), Grpc(443, mode="TLS", tls=TLS)])
def test_handler_gets_the_certificate_that_it_names(
    authority: Authority, handler: HttpGet | Grpc
) -> None:
    made = ClientCertificate(*authority.issue())
    found = client_certificates.identified(handler, {NAME: made})
    assert client_certificates.certificate_of(found) is made
    assert isinstance(found, HttpGet | Grpc)
    assert found.tls == TlsPolicy(certificate=NAME, identity=made)


@pytest.mark.parametrize(
    "handler", [TcpSocket(443), HttpGet(443), https(443, TlsPolicy("server.test"))]
)
def test_handler_that_names_no_certificate_is_as_it_was(
    authority: Authority, handler: Handler
) -> None:
    made = ClientCertificate(*authority.issue())
    assert client_certificates.identified(handler, {NAME: made}) is handler
    assert client_certificates.certificate_of(handler) is None


def test_certificate_that_is_not_there_is_an_error_with_the_reason() -> None:
    for found, reason in (
        ({}, "the Secret queue-client with a client certificate is not available"),
        ({NAME: "the Secret has no tls.key"}, "the Secret has no tls.key"),
    ):
        with pytest.raises(CertificateError) as caught:
            client_certificates.identified(https(443), found)
        assert str(caught.value) == reason


def test_authorities_of_the_certificate_verify_the_server_where_they_are_to(
    authority: Authority,
) -> None:
    name = CertificateName(file="queue", verifies_server=True)
    handler = https(443, TlsPolicy("server.test", certificate=name))
    made = ClientCertificate(*authority.issue(), authority.certificate)
    found = client_certificates.identified(handler, {name: made})
    bundle = authority.certificate.decode()
    assert isinstance(found, HttpGet)
    assert found.tls == TlsPolicy("server.test", bundle, certificate=name, identity=made)
    without = ClientCertificate(*authority.issue())
    with pytest.raises(CertificateError, match=r"has no ca\.crt to verify the server with"):
        client_certificates.identified(handler, {name: without})


def test_names_are_those_of_all_probes_of_all_containers() -> None:
    other = CertificateName(file="queue")
    containers = [
        ContainerProbes("app", liveness=Probe(https(1)), readiness=Probe(TcpSocket(1))),
        ContainerProbes(
            "sidecar",
            startup=Probe(Grpc(1, mode="TLS", tls=TlsPolicy(certificate=other))),
            readiness=Probe(https(1)),
            liveness=Probe(https(1, TlsPolicy("server.test"))),
        ),
        ContainerProbes("plain", readiness=Probe(HttpGet(1))),
    ]
    assert client_certificates.names_of(containers) == {NAME, other}
    assert client_certificates.names_of(containers[2:]) == set()


def test_rejected_certificate_is_no_verdict_about_the_pod() -> None:
    assert client_certificates.rejected("remote error: tls: access denied") == ExchangeResult(
        ProbeResult.UNKNOWN,
        "The pod rejects podgate's client certificate (remote error: tls: access denied), so this "
        "shows nothing of the pod.",
        error=True,
        lacks_certificate=True,
    )


def test_certificate_is_of_use_between_its_times(authority: Authority) -> None:
    made = ClientCertificate(*authority.issue())
    begins, ends = made.not_before, made.not_after
    assert 0 <= time.time() - begins - DAY.total_seconds() < 60
    assert 0 <= time.time() - ends + 30 * DAY.total_seconds() < 60
    now = datetime.datetime.fromtimestamp(ends, datetime.UTC)
    assert made.problem() == made.problem(begins) == made.problem(ends - 1) == ""
    assert made.problem(ends) == f"the client certificate expired at {now:%Y-%m-%d %H:%M:%S} UTC"
    assert made.problem(begins - 1).startswith("the client certificate is not valid before ")
    assert made.warning(begins - 1) == made.problem(begins - 1)


def test_server_that_demands_it_gets_the_certificate(
    authority: Authority, tmp_path: pathlib.Path
) -> None:
    certificate, key = authority.issue()
    identity = ClientCertificate(certificate, key)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = authority.demanding(tmp_path).wrap_bio(incoming, outgoing, server_side=True)
    tunnel = tls.TlsTunnel((), TlsPolicy(certificate=NAME, identity=identity))
    incoming.write(tunnel.start())
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    tunnel.receive(outgoing.read())
    incoming.write(tunnel.outgoing())
    server.do_handshake()
    assert server.getpeercert(True) == ssl.PEM_cert_to_DER_cert(certificate.decode())


def test_private_key_stays_in_no_open_file(authority: Authority) -> None:
    parts = authority.issue()
    before = set(os.listdir("/proc/self/fd"))
    ClientCertificate(*parts)
    assert set(os.listdir("/proc/self/fd")) == before


def test_certificate_has_the_content_that_it_was_made_of(authority: Authority) -> None:
    certificate, key = authority.issue()
    made = ClientCertificate(certificate, key, authority.certificate)
    assert made.has_content(certificate, key, authority.certificate)
    for others in (
        (b"", key, authority.certificate),
        (certificate, b"", authority.certificate),
        (certificate, key, b""),
    ):
        assert not made.has_content(*others)


def test_few_contexts_are_kept_and_the_oldest_goes_first(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_certificates, "_CONTEXTS_MAX", 3)
    made = ClientCertificate(*authority.issue())

    def contexts() -> list[ssl.SSLContext]:
        return [made.context((name,), "") for name in ("a", "b", "c")]

    first = contexts()
    assert contexts() == first
    made.context(("d",), "")
    assert [made.context((name,), "") for name in ("b", "c")] == first[1:]
    assert made.context(("a",), "") is not first[0]


def test_contexts_are_made_once(authority: Authority) -> None:
    made = ClientCertificate(*authority.issue())
    assert made.context(("h2",), "") is made.context(("h2",), "")
