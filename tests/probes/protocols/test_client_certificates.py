"""Probes with client certificates, against real TLS servers that demand one."""

import asyncio
import datetime
import pathlib
import ssl
import time

import pytest

from probes.engine import prober
from probes.protocols.client_certificates import CertificateError, ClientCertificate
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import CertificateName, Grpc, Handler, HttpGet, Probe, TlsPolicy
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
        ((certificate, key, b"none"), "OpenSSL rejects the certificate"),
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


def test_contexts_are_made_once(authority: Authority) -> None:
    made = ClientCertificate(*authority.issue())
    assert made.context(("h2",), "") is made.context(("h2",), "")
