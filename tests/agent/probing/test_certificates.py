"""Client certificates of probes: whose they are, and how their changes are followed."""

import asyncio
import base64
import os
import pathlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import structlog.testing
from aiohttp import web

from agent.kube.client import ApiClient
from agent.linux import beneath
from agent.logs import Event
from agent.probing import certificate_files
from agent.probing.certificates import ProbeCertificates
from probes.protocols.client_certificates import CertificateError, ClientCertificate
from probes.spec.definitions import CertificateName
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, server
from tests.probes.authorities import Authority

__all__ = ["api", "kubeconfig", "listening", "server"]

FILE = CertificateName(file="queue")
SECRET = CertificateName(secret="queue")
AUTHORITY = Authority()


def write(directory: pathlib.Path, certificate: bytes, key: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tls.crt").write_bytes(certificate)
    (directory / "tls.key").write_bytes(key)


def write_linked(directory: pathlib.Path, version: str, certificate: bytes, key: bytes) -> None:
    """As the kubelet and CSI drivers do (pkg/volume/util/atomic_writer.go)."""
    write(directory / version, certificate, key)
    (directory / "..tmp").symlink_to(version)
    (directory / "..tmp").rename(directory / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")


@asynccontextmanager
async def running(made: ProbeCertificates) -> AsyncIterator[ProbeCertificates]:
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(
    made: ProbeCertificates, name: CertificateName, holds: Callable[[ClientCertificate | str], bool]
) -> ClientCertificate | str:
    changes = made.changes.subscribe()
    async with asyncio.timeout(120):
        while not holds(found := made.of("a", "shop", {name})[name]):
            await changes.next()
    return found


def is_certificate(found: ClientCertificate | str) -> bool:
    return isinstance(found, ClientCertificate)


async def test_files_are_read_again_when_a_linked_directory_is_replaced(
    tmp_path: pathlib.Path,
) -> None:
    where = tmp_path / "shop" / "queue"
    write_linked(where, "..1", *AUTHORITY.issue())
    async with running(ProbeCertificates(tmp_path, None)) as made:
        first = await until(made, FILE, is_certificate)
        assert made.of("b", "shop", {FILE})[FILE] is first
        write_linked(where, "..2", *AUTHORITY.issue())
        second = await until(made, FILE, lambda found: found is not first)
        assert is_certificate(second)
        assert list(made.problems("a")) == []
        (where / "..data").unlink()
        await until(made, FILE, lambda found: not is_certificate(found))
        (problem,) = made.problems("a")
        assert "tls.crt does not exist" in problem
        assert list(made.problems("c")) == []


async def test_mismatch_and_expiry_are_problems(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "shop" / "queue", AUTHORITY.issue()[0], AUTHORITY.issue()[1])
    async with running(ProbeCertificates(tmp_path, None)) as made:
        await until(made, FILE, lambda found: "not the key" in str(found))
        write(tmp_path / "shop" / "queue", *AUTHORITY.issue())
        found = await until(made, FILE, is_certificate)
        assert isinstance(found, ClientCertificate)
        (problem,) = made.problems("a", found.not_after - 60)
        assert "shop/queue: the client certificate expires at" in problem
        (problem,) = made.problems("a", found.not_after + 60)
        assert "expired at" in problem


def test_directory_decides_whose_pods_may_use_a_certificate(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "bank" / "vault", *AUTHORITY.issue())
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "linked").symlink_to("../bank/vault")
    inner = shop / "inner"
    inner.mkdir()
    for name in ("tls.crt", "tls.key"):
        (inner / name).symlink_to(f"../../bank/vault/{name}")
    for name in ("linked", "inner", "../bank/vault", "vault", "/etc"):
        with pytest.raises(CertificateError):
            certificate_files.read(tmp_path, "shop", name, None)
    assert certificate_files.read(tmp_path, "bank", "vault", None)


@pytest.mark.parametrize("name", ["tls.crt", "tls.key"])
def test_file_that_is_none_or_endless_is_rejected(tmp_path: pathlib.Path, name: str) -> None:
    where = tmp_path / "shop" / "queue"
    write(where, *AUTHORITY.issue())
    (where / name).unlink()
    os.mkfifo(where / name)
    with pytest.raises(CertificateError, match=name):
        certificate_files.read(tmp_path, "shop", "queue", None)
    (where / name).unlink()
    (where / name).write_bytes(b"x" * (certificate_files.MAX_BYTES + 1))
    with pytest.raises(CertificateError, match="longer than"):
        certificate_files.read(tmp_path, "shop", "queue", None)


def test_certificate_is_made_again_only_of_other_content(tmp_path: pathlib.Path) -> None:
    where = tmp_path / "shop" / "queue"
    certificate, key = AUTHORITY.issue()
    write(where, certificate, key)
    first = certificate_files.read(tmp_path, "shop", "queue", None)
    assert first.authorities == ""
    assert certificate_files.read(tmp_path, "shop", "queue", first) is first
    (where / "ca.crt").write_bytes(certificate)
    second = certificate_files.read(tmp_path, "shop", "queue", first)
    assert second.authorities == certificate.decode()
    assert certificate_files.read(tmp_path, "shop", "queue", second) is second


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_files_that_are_replaced_one_after_the_other_are_read_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    where = tmp_path / "shop" / "queue"
    write(where, *AUTHORITY.issue())
    reads: list[str] = []

    def read_file(directory: int, name: str, max_bytes: int) -> bytes:
        reads.append(name)
        missing = name == "tls.key" and reads.count(name) <= failures
        return original(directory, "none" if missing else name, max_bytes)

    original = beneath.read_file
    monkeypatch.setattr(beneath, "read_file", read_file)
    if failures < 3:
        assert certificate_files.read(tmp_path, "shop", "queue", None)
    else:
        with pytest.raises(CertificateError) as raised:
            certificate_files.read(tmp_path, "shop", "queue", None)
        assert str(raised.value) == (
            "the client certificate in the directory shop/queue is unusable: tls.key does not exist"
        )
    assert reads.count("tls.key") == min(failures + 1, 3)


def test_directory_that_cannot_be_opened_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CertificateError) as raised:
        certificate_files.read(tmp_path, "shop", "queue", None)
    assert str(raised.value) == (
        "the directory shop/queue with a client certificate cannot be opened "
        "(No such file or directory)"
    )


async def test_directory_of_another_certificate_is_followed_too(tmp_path: pathlib.Path) -> None:
    other = CertificateName(file="other")
    write(tmp_path / "shop" / "queue", *AUTHORITY.issue())
    async with running(ProbeCertificates(tmp_path, None)) as made:
        first = await until(made, FILE, is_certificate)
        await until(made, other, lambda found: "cannot be opened" in str(found))
        write(tmp_path / "shop" / "other", *AUTHORITY.issue())
        made.changes.subscribe()
        await until(made, other, is_certificate)
        # The pod names it no more.
        (key,) = made._entries
        assert str(key) == "shop/other"
        assert made.of("b", "shop", {FILE})[FILE] is not first


async def test_read_and_unusable_certificates_are_logged_when_they_change(
    tmp_path: pathlib.Path,
) -> None:
    where = tmp_path / "shop" / "queue"
    with structlog.testing.capture_logs() as lines:
        async with running(ProbeCertificates(tmp_path, None)) as made:
            made.of("b", "shop", {SECRET})
            await until(made, FILE, lambda found: "cannot be opened" in str(found))
            (problem,) = made.problems("a")
            made.forget("b")
            write(where, *AUTHORITY.issue())
            await until(made, FILE, is_certificate)
    logged = [(line["event"], line["log_level"], line["certificate"]) for line in lines]
    # Of the Secret and the file, and when the file was written.
    assert logged[:2] == [(Event.PROBE_CERTIFICATE_UNUSABLE, "warning", "shop/queue")] * 2
    assert logged[-1] == (Event.PROBE_CERTIFICATE_READ, "info", "shop/queue")
    assert problem == (
        "Probes have no client certificate: the directory shop/queue with a client certificate "
        "cannot be opened (No such file or directory)"
    )


def test_certificate_that_was_not_read_yet_is_no_problem() -> None:
    made = ProbeCertificates(None, None)
    assert made.of("a", "shop", {FILE, SECRET}) == dict.fromkeys(
        (FILE, SECRET), "the client certificate shop/queue has not been read yet"
    )
    assert list(made.problems("a")) == []
    made.of("b", "shop", {FILE})
    made.forget("a")
    assert len(made._entries) == 1
    made.of("b", "shop", ())
    assert made._entries == {}


async def test_without_a_directory_a_file_is_a_problem() -> None:
    async with running(ProbeCertificates(None, None)) as made:
        await until(made, FILE, lambda found: "--probe-certificates-dir" in str(found))


class Secrets:
    """Answers for the one Secret; `code` other than 200 rejects."""

    def __init__(self, server: ApiServer) -> None:
        self.code = 200
        self.type = "kubernetes.io/tls"
        self.parts = AUTHORITY.issue()
        self.paths: list[str] = []
        server.faults.append(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse | None:
        if "/secrets" not in request.path:
            return None
        self.paths.append(request.path)
        if self.code != 200:
            return web.json_response({"kind": "Status", "code": self.code}, status=self.code)
        names = ("tls.crt", "tls.key")
        data = {
            name: base64.b64encode(part).decode()
            for name, part in zip(names, self.parts, strict=True)
        }
        return web.json_response({"kind": "Secret", "type": self.type, "data": data})


@pytest.mark.looptime
async def test_secret_is_read_by_name_and_again_every_minute(
    server: ApiServer, api: ApiClient
) -> None:
    secrets = Secrets(server)
    async with running(ProbeCertificates(None, api)) as made:
        first = await until(made, SECRET, is_certificate)
        assert set(secrets.paths) == {"/api/v1/namespaces/shop/secrets/queue"}
        secrets.code = 503
        await asyncio.sleep(130)
        assert made.of("a", "shop", {SECRET})[SECRET] is first
        secrets.code, secrets.parts = 200, AUTHORITY.issue()
        await until(made, SECRET, lambda found: is_certificate(found) and found is not first)
        # A hint about a file.
        count = len(secrets.paths)
        made.of("b", "shop", {FILE})
        await asyncio.sleep(1)
        assert len(secrets.paths) == count
        made.forget("a")
        await asyncio.sleep(200)
        assert len(secrets.paths) == count


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("code", "type", "text"),
    [
        (403, "", "bind a Role in its namespace that names it"),
        (404, "", "does not exist"),
        (200, "Opaque", "is not of type kubernetes.io/tls"),
    ],
)
async def test_secret_that_may_not_be_used_is_withdrawn(
    server: ApiServer, api: ApiClient, code: int, type: str, text: str
) -> None:
    secrets = Secrets(server)
    async with running(ProbeCertificates(None, api)) as made:
        await until(made, SECRET, is_certificate)
        secrets.code, secrets.type = code, type
        await asyncio.sleep(70)
        assert text in str(made.of("a", "shop", {SECRET})[SECRET])
        (problem,) = made.problems("a")
        assert text in problem
