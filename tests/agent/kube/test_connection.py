"""How the API server is reached, by a kubeconfig or the pod's own account; what cannot be used is
one sentence."""

import json
import logging
import pathlib
import socket
import ssl

import aiohttp
import pytest

from agent.kube import connection
from agent.kube.connection import Connection
from tests.agent.api.certificates import Authority
from tests.agent.kube.apiserver import ApiServer
from tests.blocking import may_block


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def account(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """What the kubelet gives to each pod."""
    (tmp_path / "token").write_text("secret\n", encoding="utf-8")
    (tmp_path / "ca.crt").write_bytes(b"PEM")
    monkeypatch.setattr(connection, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return tmp_path


@pytest.mark.parametrize("names", [["none"], ["none", "nor-this"]])
def test_missing_kubeconfig_is_named(
    names: list[str], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = ":".join(str(tmp_path / name) for name in names)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(connection.ConnectionConfigError, match="no such file"),
    ):
        connection.read(paths)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")],
)
@pytest.mark.usefixtures("account")
def test_pods_account_names_the_server_in_both_families(
    monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    assert connection.read(None) == Connection(url, "Bearer secret", authority=b"PEM")


@pytest.mark.parametrize("variable", ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"])
@pytest.mark.usefixtures("account")
def test_pod_without_the_servers_address_has_no_account(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable)
    with pytest.raises(connection.ConnectionConfigError, match="are not set"):
        connection.read(None)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("token", b"", "is empty"),
        ("ca.crt", b"", "is empty"),
        ("token", None, "No such file"),
        ("token", b"\xff", "can't decode"),
    ],
)
def test_pod_without_a_usable_file_has_no_account(
    account: pathlib.Path, file: str, content: bytes | None, words: str
) -> None:
    (account / file).unlink()
    if content is not None:
        (account / file).write_bytes(content)
    with pytest.raises(connection.ConnectionConfigError, match=words):
        connection.read(None)


@pytest.mark.parametrize("proxy", ["http://proxy:3128", "https://proxy:3128"])
@pytest.mark.usefixtures("account")
def test_proxy_of_the_environment_is_part_of_the_way(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    assert connection.read(None).proxy == proxy


def _kubeconfig(path: pathlib.Path, cluster: dict[str, object], user: dict[str, object]) -> str:
    content = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@may_block("it runs in a thread, with a loop of its own for the official client's loader")
def _read(kubeconfig: str) -> Connection:
    return connection.read(kubeconfig)


def test_kubeconfig_is_read_with_all_that_it_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://other:3128")
    files = {name: tmp_path / name for name in ("authority", "certificate", "key")}
    for name, file in files.items():
        file.write_text(f"PEM of the {name}.", encoding="utf-8")
    path = _kubeconfig(
        tmp_path / "kubeconfig",
        {
            "server": "https://198.18.0.1:6443/",
            "certificate-authority": str(files["authority"]),
            "tls-server-name": "kubernetes",
            "proxy-url": "http://proxy:3128",
        },
        {"client-certificate": str(files["certificate"]), "client-key": str(files["key"])},
    )
    assert _read(path) == Connection(
        "https://198.18.0.1:6443",
        authority=b"PEM of the authority.",
        certificate=(str(files["certificate"]), str(files["key"])),
        certificate_content=b"PEM of the certificate.PEM of the key.",
        server_name="kubernetes",
        proxy="http://proxy:3128",
    )


def test_token_file_may_end_with_a_newline(tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text("secret\n", encoding="utf-8")
    path = _kubeconfig(
        tmp_path / "kubeconfig",
        {"server": "https://198.18.0.1:6443", "insecure-skip-tls-verify": True},
        {"tokenFile": str(tmp_path / "token")},
    )
    expected = Connection("https://198.18.0.1:6443", "Bearer secret", is_verified=False)
    assert _read(path) == expected


def test_name_that_the_kubeconfig_lacks_is_in_the_sentence(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text('{"current-context": "nowhere", "contexts": []}', encoding="utf-8")
    with pytest.raises(connection.ConnectionConfigError, match="nowhere"):
        _read(str(path))


def test_clients_certificate_needs_its_own_key(tmp_path: pathlib.Path) -> None:
    authority = Authority.make()
    mine, others = (authority.files(tmp_path / name) for name in ("mine", "others"))
    both = tmp_path / "both"
    both.write_bytes(mine.certificate.read_bytes() + mine.key.read_bytes())
    for certificate in ((str(mine.certificate), str(mine.key)), (str(both), "")):
        Connection("https://x", certificate=certificate).tls()
    mixed = Connection("https://x", certificate=(str(mine.certificate), str(others.key)))
    with pytest.raises(connection.ConnectionConfigError, match="cannot be read"):
        mixed.tls()


HERE = Connection("https://198.18.0.1:6443", "Bearer first", authority=b"PEM")


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (HERE, True),
        (Connection(HERE.url, "Bearer second", authority=b"PEM"), True),
        (Connection(HERE.url, "Bearer first", authority=b"new"), False),
        (Connection("https://198.18.0.2:6443", "Bearer first", authority=b"PEM"), False),
        (None, False),
    ],
    ids=["equal", "other token", "other authority", "other address", "none before"],
)
def test_connections_stay_open_while_only_the_token_changes(
    other: Connection | None, *, is_same: bool
) -> None:
    assert HERE.has_same_server(other) is is_same


@pytest.mark.parametrize("is_verified", [True, False])
def test_certificate_and_name_of_the_server_are_verified_unless_that_is_off(
    *, is_verified: bool
) -> None:
    context = Connection("https://198.18.0.1:6443", is_verified=is_verified).tls()
    expected = (True, ssl.CERT_REQUIRED) if is_verified else (False, ssl.CERT_NONE)
    assert (context.check_hostname, context.verify_mode) == expected


def test_system_decides_which_authorities_count_unless_some_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, systems = (
        Authority.make(name).files(tmp_path / name).authorities for name in ("ours", "systems")
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(systems))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))

    def trusted(authority: bytes) -> list[bytes]:
        return Connection("https://x", authority=authority).tls().get_ca_certs(binary_form=True)

    assert trusted(b"") == [ssl.PEM_cert_to_DER_cert(systems.read_text())]
    assert trusted(ours.read_bytes()) == [ssl.PEM_cert_to_DER_cert(ours.read_text())]


async def test_server_that_is_gone_without_a_word_is_noticed_in_half_a_minute() -> None:
    server = ApiServer()
    tls = Connection("https://x").tls()
    async with (
        server.running(),
        aiohttp.ClientSession(connector=connection.connector(tls)) as session,
        session.get(f"http://127.0.0.1:{server.port}/?watch=true&resourceVersion=0") as response,
    ):
        assert response.connection is not None
        assert response.connection.transport is not None
        sock = response.connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, every, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * count <= 30
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
