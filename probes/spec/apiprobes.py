"""Probes of a pod manifest, with the API's defaults and checks.

Defaults are those of pkg/apis/core/v1/defaults.go `SetDefaults_Probe`, checks those of
pkg/apis/core/validation/validation.go `validateProbe`; comments mark where podgate is stricter.
"""

import re

from probes.spec.definitions import ContainerPort, Exec, Grpc, Handler, HttpGet, Probe, TcpSocket
from probes.spec.fields import Fields, clipped

HOST_REASON = "ProbeHostNotAllowed"
"""KEP-4559: a probe's `host` lets a pod's author send the prober anywhere. Never dialled."""

PORT_MAX = 65535
HEADER_NAME = re.compile(r"[-A-Za-z0-9]+")  # apimachinery's validation.IsHTTPHeaderName


def read_probe(fields: Fields, named_ports: dict[str, int], *, readiness: bool) -> Probe | None:
    """Read one probe of the API's shape; None if anything about it is wrong."""
    mistakes = len(fields.errors)
    handler = _read_handler(fields, named_ports)
    success_threshold = fields.integer("successThreshold", default=1, minimum=0) or 1
    if not readiness and success_threshold != 1:
        fields.add_problem("successThreshold", f"must be 1 here, not {success_threshold}")
    grace: int | None = None
    if fields.has("terminationGracePeriodSeconds"):
        if readiness:
            fields.add_problem(
                "terminationGracePeriodSeconds", "is not allowed on a readiness probe"
            )
        else:
            grace = fields.integer("terminationGracePeriodSeconds", default=1, minimum=1)
    initial_delay = fields.integer("initialDelaySeconds", default=0, minimum=0)
    # As in the API, an explicit 0 of these means "not given".
    timeout = fields.integer("timeoutSeconds", default=1, minimum=0) or 1
    # The API reads 0 as 10 here, which is not what an author of 0 means, so podgate reports it.
    period = fields.integer("periodSeconds", default=10, minimum=1)
    failure_threshold = fields.integer("failureThreshold", default=3, minimum=0) or 3
    if handler is None or len(fields.errors) != mistakes:
        return None
    return Probe(
        handler=handler,
        initial_delay_seconds=float(initial_delay),
        timeout_seconds=float(timeout),
        period_seconds=float(period),
        success_threshold=success_threshold,
        failure_threshold=failure_threshold,
        termination_grace_period_seconds=None if grace is None else float(grace),
    )


_HANDLERS = ("httpGet", "tcpSocket", "grpc", "exec")


def _read_handler(fields: Fields, named_ports: dict[str, int]) -> Handler | None:
    given = [name for name in _HANDLERS if fields.has(name)]
    if not given:
        fields.add_problem(None, f"needs a handler: one of {', '.join(_HANDLERS)}")
        return None
    if len(given) > 1:
        fields.add_problem(None, f"has {len(given)} handlers ({', '.join(given)}): keep one")
        return None
    child = fields.child(given[0])
    match given[0]:
        case "httpGet":
            return read_http_get(child, named_ports)
        case "tcpSocket":
            _reject_host(child)
            port = _read_port(child, named_ports)
            return None if port is None else TcpSocket(port)
        case "grpc":
            return _read_grpc(child)
        case _:
            return _read_exec(child)


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


def _read_grpc(fields: Fields) -> Grpc | None:
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


def _read_exec(fields: Fields) -> Exec | None:
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


def named_ports_of(container: Fields) -> list[ContainerPort]:
    """The container's ports that have a name."""
    named = []
    for port in container.children("ports"):
        name = port.text("name")
        number = port.raw("containerPort")
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= PORT_MAX:
            port.add_problem("containerPort", f"must be a number from 1 to {PORT_MAX}")
        elif name:
            named.append(ContainerPort(name, port.text("protocol", "TCP"), number))
    return named
