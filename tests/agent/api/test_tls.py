"""Certificates of mutual TLS, from files that are replaced."""

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import AsyncIterator

import grpc
import pytest
import structlog

from agent.api.tls import CurrentTls, TlsContent, TlsError, TlsFiles
from agent.logs import Event
from tests.agent.api.certificates import Authority

_WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make()


def copied(source: TlsFiles, target: TlsFiles) -> None:
    """Replace files one after the other."""
    for field in dataclasses.fields(TlsFiles):
        path: pathlib.Path = getattr(target, field.name)
        path.write_bytes(getattr(source, field.name).read_bytes())


async def content(files: TlsFiles) -> TlsContent:
    return await asyncio.to_thread(files.read)


async def credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    return (await content(files)).channel_credentials()


async def current(files: TlsFiles) -> CurrentTls:
    tls = CurrentTls(files)
    assert await asyncio.to_thread(tls.refresh)
    return tls


@contextlib.asynccontextmanager
async def serving(tls: CurrentTls) -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def is_accepted(target: str, credentials: grpc.ChannelCredentials) -> bool:
    """Whether both sides trust each other: the call reaches the server, which has no methods."""
    async with grpc.aio.secure_channel(target, credentials) as channel:
        try:
            await channel.unary_unary("/none/None")(b"", timeout=_WAIT_SECONDS)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    raise AssertionError("there is no such method")


async def test_sides_with_certificates_of_one_authority_connect(
    authority: Authority, tmp_path: pathlib.Path
) -> None:
    server = await current(authority.files(tmp_path / "server"))
    client = await credentials(authority.files(tmp_path / "client"))
    async with serving(server) as target:
        assert await is_accepted(target, client)


async def test_clients_of_another_authority_or_without_certificate_are_rejected(
    authority: Authority, tmp_path: pathlib.Path
) -> None:
    files = authority.files(tmp_path / "server")
    authorities = files.authorities.read_bytes()
    foreign = await content(Authority.make("other").files(tmp_path / "foreign"))
    mixed = dataclasses.replace(foreign, authorities=authorities)
    async with serving(await current(files)) as target:
        assert not await is_accepted(target, mixed.channel_credentials())
        plain = grpc.ssl_channel_credentials(authorities)
        assert not await is_accepted(target, plain)
        assert not await is_accepted(target, foreign.channel_credentials())


async def test_server_uses_renewed_certificates_without_a_restart(
    authority: Authority, tmp_path: pathlib.Path
) -> None:
    files = authority.files(tmp_path / "server")
    old = await credentials(authority.files(tmp_path / "old"))
    new_authority = Authority.make("new")
    new = await credentials(new_authority.files(tmp_path / "new"))
    async with serving(await current(files)) as target:
        assert await is_accepted(target, old)
        assert not await is_accepted(target, new)
        copied(new_authority.files(tmp_path / "renewed"), files)
        assert await is_accepted(target, new)
        assert not await is_accepted(target, old)


async def test_files_that_do_not_belong_together_leave_the_previous_ones_in_use(
    authority: Authority, tmp_path: pathlib.Path
) -> None:
    files = authority.files(tmp_path / "server")
    client = await credentials(authority.files(tmp_path / "client"))
    tls = await current(files)
    renewed = authority.files(tmp_path / "renewed")
    files.certificate.write_bytes(renewed.certificate.read_bytes())
    async with serving(tls) as target:
        assert await is_accepted(target, client)
        assert tls.problem == (
            f"{files.key} is not the key of {files.certificate}; replace both in one step"
        )
        files.key.write_bytes(renewed.key.read_bytes())
        assert await is_accepted(target, client)
        assert tls.problem == ""
    assert tls.content == await content(renewed)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("ca.crt", None, "cannot be read (No such file or directory); check the file"),
        ("ca.crt", b"", "has no certificate (PEM); check the file"),
        ("tls.crt", b"\x00", "has no certificate (PEM); check the file"),
        ("tls.key", b"key", "has no private key (PEM, without a passphrase); check the file"),
    ],
)
def test_unusable_file_is_named(
    authority: Authority, tmp_path: pathlib.Path, name: str, content: bytes | None, problem: str
) -> None:
    files = authority.files(tmp_path)
    path = tmp_path / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(TlsError) as raised:
        files.read()
    assert str(raised.value) == f"{path} {problem}"


async def test_unusable_files_are_reported_once(
    authority: Authority, tmp_path: pathlib.Path
) -> None:
    tls = await current(authority.files(tmp_path))
    (tmp_path / "tls.key").unlink()
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            assert not await asyncio.to_thread(tls.refresh)
    assert [line["event"] for line in lines] == [Event.SERVICES_TLS_UNUSABLE]
    assert "tls.key cannot be read" in tls.problem
