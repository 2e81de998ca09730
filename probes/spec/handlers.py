"""The kinds of handlers: how each is named, read from a pod's spec, and prepared for an address.

All that depends on the kind alone is in its entry of `KINDS`, or in its struct in
probes/spec/definitions.py.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from probes.spec import handler_fields
from probes.spec.definitions import PORT_MAX, Exec, Grpc, Handler, HttpGet, TcpSocket
from probes.spec.fields import Fields, clipped

if TYPE_CHECKING:
    from probes.protocols.exchanges import ExchangeTarget

HOST_REASON = "ProbeHostNotAllowed"
"""KEP-4559: a probe's `host` lets a pod's author send the prober anywhere. Never dialled."""

HEADER_NAME = re.compile(r"[-A-Za-z0-9]+")  # apimachinery's validation.IsHTTPHeaderName


@dataclasses.dataclass(frozen=True, slots=True)
class HandlerKind:
    """One kind of handler.

    name: in podgate's probe spec and on its command line, and fields: its fields there; empty: the
    kubelet alone runs it. read: from the handler's content in a pod's spec, with the container's
    named ports; None if it is wrong. target: prepares a handler for an address and a timeout in
    seconds; protocols are imported when the first probe runs. has_host: whether the API's has a
    field `host`.
    """

    struct: type[Any]
    name: str
    fields: type[handler_fields.HandlerFields] | None
    read: Callable[[Fields, dict[str, int]], Handler | None]
    target: "Callable[[Any, str, float], ExchangeTarget] | None"
    has_host: bool = False


def kind_of(handler: Handler) -> HandlerKind:
    return next(kind for kind in KINDS.values() if kind.struct is type(handler))


def _http_target(handler: HttpGet, address: str, _: float) -> "ExchangeTarget":
    from probes.protocols.http_get import HttpTarget

    return HttpTarget(handler, address)


def _tcp_target(handler: TcpSocket, _: str, __: float) -> "ExchangeTarget":
    from probes.protocols.tcp import TcpTarget

    return TcpTarget(handler.port)


def _grpc_target(handler: Grpc, address: str, timeout_seconds: float) -> "ExchangeTarget":
    from probes.protocols.grpc_health import GrpcTarget

    return GrpcTarget(handler, address, timeout_seconds)


def read_http_get(
    fields: Fields, named_ports: dict[str, int], *, has_default_port: bool = False
) -> HttpGet | None:
    _reject_host(fields)
    scheme = fields.choice("scheme", ("HTTP", "HTTPS"))
    if has_default_port and not fields.has("port"):
        # handlers.go uses 80 for both; KEP-2771 means the scheme's default.
        port: int | None = 443 if scheme == "HTTPS" else 80
    else:
        port = _read_port(fields, named_ports)
    protocol = fields.choice("protocol", ("HTTP1", "HTTP2"))
    if protocol == "HTTP2" and scheme != "HTTP":
        fields.add_problem("protocol", "may be HTTP2 only with scheme HTTP")
    headers: list[tuple[str, str]] = []
    for header in fields.children("httpHeaders"):
        name = header.text("name")
        if not HEADER_NAME.fullmatch(name):
            header.add_problem("name", f"must be letters, digits and dashes, not {clipped(name)}")
        headers.append((name, header.text("value")))
    path = fields.text("path") or "/"
    if port is None:
        return None
    return HttpGet(
        port=port,
        path=path,
        scheme="HTTPS" if scheme == "HTTPS" else "HTTP",
        headers=tuple(headers),
        protocol="HTTP2" if protocol == "HTTP2" else "HTTP1",
    )


def _read_tcp_socket(fields: Fields, named_ports: dict[str, int]) -> TcpSocket | None:
    _reject_host(fields)
    port = _read_port(fields, named_ports)
    return None if port is None else TcpSocket(port)


def _read_grpc(fields: Fields, _: dict[str, int]) -> Grpc | None:
    if isinstance(fields.raw("port"), str):
        # The API's type is int32 here: a gRPC probe cannot name a port.
        fields.add_problem("port", "must be a number: grpc probes cannot use port names")
        return None
    port = _read_port(fields, {})
    service = fields.text("service")
    mode = fields.choice("mode", ("Plaintext", "TLS"))
    if port is None:
        return None
    return Grpc(port=port, service=service, mode="TLS" if mode == "TLS" else "Plaintext")


def _read_exec(fields: Fields, _: dict[str, int]) -> Exec | None:
    command = fields.items("command")
    if not command or not all(isinstance(word, str) for word in command):
        fields.add_problem("command", "must be a list of at least one string")
        return None
    return Exec(tuple(str(word) for word in command))


def _reject_host(fields: Fields) -> None:
    if fields.text("host"):
        fields.add_problem(
            "host", "must be empty: a probe goes to its own pod only", reason=HOST_REASON
        )


def _read_port(fields: Fields, named_ports: dict[str, int]) -> int | None:
    """A number, a port name of this container, or a number in quotes.

    The order of pkg/probe/util.go `ResolveContainerPort`.
    """
    value = fields.raw("port")
    if isinstance(value, str):
        if value in named_ports:
            return named_ports[value]
        if not (value.isascii() and value.isdigit() and len(value) <= 5):
            fields.add_problem(
                "port", f"names {clipped(value)}, which is no port of this container"
            )
            return None
        value = int(value)
    if value is None:
        fields.add_problem("port", "is missing")
    elif isinstance(value, bool) or not isinstance(value, int):
        fields.add_problem("port", "must be a number or a port name")
    elif not 1 <= value <= PORT_MAX:
        fields.add_problem("port", f"must be 1 to {PORT_MAX}")
    else:
        return value
    return None


KINDS = {
    "httpGet": HandlerKind(
        HttpGet, "http", handler_fields.HttpFields, read_http_get, _http_target, has_host=True
    ),
    "tcpSocket": HandlerKind(
        TcpSocket, "tcp", handler_fields.TcpFields, _read_tcp_socket, _tcp_target, has_host=True
    ),
    "grpc": HandlerKind(Grpc, "grpc", handler_fields.GrpcFields, _read_grpc, _grpc_target),
    "exec": HandlerKind(Exec, "", None, _read_exec, None),
}
"""By the API's name, which is the field of a probe that has the handler."""
NAMES = tuple(kind.name for kind in KINDS.values() if kind.name)
