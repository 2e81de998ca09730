"""How the API server is reached: address, certificates and token. Reading blocks: for threads.

A pod's service account is read here, as client-go does (rest.InClusterConfig); a kubeconfig by the
official client, which knows its many forms. Importing that takes a quarter of a second and 15 MB,
so an agent in a pod does without it.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import ssl
from typing import TYPE_CHECKING, Any

from agent.errors import PodgateError
from agent.kube import environment_proxy

# aiohttp is imported where it is used: it takes 0.1 s, and the first gates do without it.
if TYPE_CHECKING:
    from agent.http_library import aiohttp

SERVICE_ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What the kubelet mounts into each pod: `token` and `ca.crt`."""

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")

# tcp(7), in seconds; the last one in milliseconds, for what the server does not acknowledge.
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 25_000,
}


class ConnectionConfigError(PodgateError):
    """An unusable configuration; the message is one sentence without its full stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """authorization: the header's value, or empty; server_name: in the server's certificate, if not
    its address; proxy: its URL, or empty."""

    url: str
    authorization: str = ""
    is_verified: bool = True
    authority: bytes = b""
    """Certificates, PEM; empty: the system's."""
    certificate: tuple[str, str] = ("", "")
    """Files of the client's own certificate and key."""
    certificate_content: bytes = b""
    """Of these files."""
    server_name: str = ""
    proxy: str = ""

    def has_same_server(self, other: "Connection | None") -> bool:
        """Whether open connections can be used further: only the token may differ."""
        return other is not None and dataclasses.replace(other, authorization="") == (
            dataclasses.replace(self, authorization="")
        )

    def tls(self) -> ssl.SSLContext:
        """Reads the files. Raises `ConnectionConfigError`."""
        try:
            context = _verifying(self.authority)
            file, key = self.certificate
            if file:
                context.load_cert_chain(file, key or None)
        except (OSError, ValueError) as error:
            raise ConnectionConfigError(f"its certificates cannot be read: {error}") from error
        if not self.is_verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _verifying(authorities: bytes) -> ssl.SSLContext:
    """Accepts the servers that client-go accepts (crypto/x509). Raises `ConnectionConfigError`.

    Python's own default context demands, since 3.13, extensions that certificates of EKS, MicroK8s
    and older GKE lack (VERIFY_X509_STRICT); before, that the authority signs itself.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not authorities:
        context.load_default_certs()
        return context
    is_any_readable = False
    for block in _CERTIFICATE.findall(authorities):
        with contextlib.suppress(ssl.SSLError):  # as AppendCertsFromPEM
            context.load_verify_locations(cadata=block.decode("ascii"))
            is_any_readable = True
    if not is_any_readable:
        raise ConnectionConfigError("there is no certificate of an authority in its PEM")
    return context


def read(kubeconfig: str | None) -> Connection:
    """From a kubeconfig, or several as in KUBECONFIG; None: from the pod's own account.

    Raises `ConnectionConfigError`.
    """
    found = _of_service_account() if kubeconfig is None else _of_kubeconfig(kubeconfig)
    # aiohttp would find it at each request, in a thread, and read ~/.netrc in another one.
    try:
        proxy = found.proxy or environment_proxy.find(found.url)
    except ValueError as error:
        raise ConnectionConfigError(f"{found.url} is no address of a server: {error}") from error
    if proxy and not proxy.startswith(("http://", "https://")):
        raise ConnectionConfigError(
            f"{proxy} is not an HTTP proxy, and no other kind is supported; name another one, or "
            f"the API server ({found.url}) in NO_PROXY"
        )
    return dataclasses.replace(found, proxy=proxy)


def connector(tls: ssl.SSLContext) -> "aiohttp.BaseConnector":
    """Opens and keeps connections. One whose way is lost ends after some 25 s: watches send nothing
    themselves, and would only miss a bookmark later. client-go pings its own after 30 s."""
    from agent.http_library import aiohttp

    return aiohttp.TCPConnector(ssl=tls, socket_factory=_keepalive_socket)


def _keepalive_socket(
    info: tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]],
) -> socket.socket:
    sock = socket.socket(*info[:3])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def _of_service_account() -> Connection:
    names = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    host, port = (os.environ.get(name, "") for name in names)
    if not host or not port:
        raise ConnectionConfigError(f"{' and '.join(names)} are not set")
    try:
        token = (SERVICE_ACCOUNT / "token").read_text(encoding="utf-8").strip()
        authority = (SERVICE_ACCOUNT / "ca.crt").read_bytes()
    except (OSError, ValueError) as error:
        raise ConnectionConfigError(str(error)) from error
    if not token or not authority:
        raise ConnectionConfigError(f"the token or ca.crt in {SERVICE_ACCOUNT} is empty")
    address = f"[{host}]" if ":" in host else host
    return Connection(f"https://{address}:{port}", f"Bearer {token}", authority=authority)


def _of_kubeconfig(kubeconfig: str) -> Connection:
    # The loader logs files that are missing, and then complains about their content.
    if not any(pathlib.Path(path).exists() for path in kubeconfig.split(os.pathsep)):
        raise ConnectionConfigError("no such file")
    from kubernetes.aio import client as official
    from kubernetes.aio import config as official_config

    found = official.Configuration()
    try:
        # In a loop of its own: credential plugins are processes, and the loader waits for them.
        asyncio.run(
            official_config.load_kube_config(
                kubeconfig, client_configuration=found, persist_config=False
            )
        )
        certificate = found.cert_file or "", found.key_file or ""
        return Connection(
            found.host.rstrip("/"),
            # A newline at the end of a token file would end the header.
            (found.api_key.get("BearerToken") or "").strip(),
            found.verify_ssl,
            pathlib.Path(found.ssl_ca_cert).read_bytes() if found.ssl_ca_cert else b"",
            certificate,
            b"".join(pathlib.Path(file).read_bytes() for file in certificate if file),
            found.tls_server_name or "",
            found.proxy or "",
        )
    except Exception as error:  # the loader raises KeyError, TypeError, YAMLError and more
        raise ConnectionConfigError(str(error) or type(error).__name__) from error
