"""What to probe and how: the probes of a pod manifest, with the API's defaults and checks.

Defaults are those of pkg/apis/core/v1/defaults.go `SetDefaults_Probe`, checks
those of pkg/apis/core/validation/validation.go `validateProbe`; where podgate
is stricter, the code says so.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from probes.fields import Fields, SpecError, clipped

__all__ = [
    "ContainerProbes",
    "DeclaredPorts",
    "Exec",
    "Grpc",
    "Handler",
    "HttpGet",
    "PodSpec",
    "Probe",
    "SpecError",
    "TcpSocket",
    "parse_pod",
]

HOST_REASON: Final = "ProbeHostNotAllowed"
"""KEP-4559: a probe's `host` lets a pod's author send the prober anywhere. Never dialled."""

PORT_MAX: Final = 65535
_HEADER_NAME = re.compile(r"[-A-Za-z0-9]+")  # apimachinery's validation.IsHTTPHeaderName


class HttpGet(msgspec.Struct, frozen=True):
    """GET a path; 200 to 399 is healthy."""

    port: int
    path: str = "/"
    scheme: Literal["HTTP", "HTTPS"] = "HTTP"
    headers: tuple[tuple[str, str], ...] = ()
    """(name, value) as written: spelling, order and duplicates kept."""
    protocol: Literal["HTTP1", "HTTP2"] = "HTTP1"
    """HTTP2 is h2c by prior knowledge (KEP-5999)."""


class TcpSocket(msgspec.Struct, frozen=True):
    """Connect; an open port is healthy."""

    port: int


class Grpc(msgspec.Struct, frozen=True):
    """Ask grpc.health.v1.Health/Check; only SERVING is healthy."""

    port: int
    service: str = ""
    mode: Literal["Plaintext", "TLS"] = "Plaintext"
    """TLS does not verify the certificate (KEP-4939)."""


class Exec(msgspec.Struct, frozen=True):
    """A command inside the container: the kubelet's to run, never podgate's."""

    command: tuple[str, ...]


Handler = HttpGet | TcpSocket | Grpc | Exec


class Probe(msgspec.Struct, frozen=True):
    """One probe: how to ask, how often, and how many answers make a change.

    Seconds are floats: the API knows whole ones only, podgate's own probe
    specs go below.
    """

    handler: Handler
    initial_delay_seconds: float = 0.0
    timeout_seconds: float = 1.0
    period_seconds: float = 10.0
    success_threshold: int = 1
    failure_threshold: int = 3
    termination_grace_period_seconds: float | None = None
    """For the kubelet, which alone restarts containers; podgate only carries it."""


class ContainerProbes(msgspec.Struct, frozen=True):
    """The probes of one regular or restartable init container."""

    name: str
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None
    restartable_init: bool = False


class DeclaredPorts(msgspec.Struct, frozen=True):
    """Which TCP ports of the pod the kubelet may have to reach for probes and hooks."""

    any_port: bool = False
    """An http or https probe or hook: the kubelet follows redirects to other ports."""
    ports: frozenset[int] = frozenset()
    """The ports named by probes and hooks, those of http too."""


class PodSpec(msgspec.Struct, frozen=True):
    """What parse_pod made of a manifest: the good probes, and what is wrong with the rest."""

    containers: tuple[ContainerProbes, ...] = ()
    declared: DeclaredPorts = DeclaredPorts()
    host_network: bool = False
    errors: tuple[SpecError, ...] = ()


def parse_pod(pod: object) -> PodSpec:
    """Read the probes of a decoded pod manifest (YAML or JSON); never raises.

    All mistakes are collected; a probe with one is left out, its neighbours
    stay. Probes on containers that run once are refused as the API does.
    """
    errors: list[SpecError] = []
    root = Fields(pod if pod is not None else "null", "", errors, reason="InvalidPod")
    if errors:
        return PodSpec(errors=(SpecError("", "InvalidPod", "the manifest is not an object."),))
    spec = root.child("spec")
    if not spec.has("containers"):
        spec.refuse("containers", "is missing: a pod needs at least one container")
    spec.reason = "InvalidProbe"
    reader = _PodReader()
    for container in spec.children("initContainers"):
        reader.read(container, init=True)
    for container in spec.children("containers"):
        reader.read(container, init=False)
    return PodSpec(
        containers=tuple(reader.containers),
        declared=DeclaredPorts(reader.any_port, frozenset(reader.ports)),
        host_network=spec.flag("hostNetwork"),
        errors=tuple(errors),
    )


class _PodReader:
    """Collects what the containers of one pod declare."""

    def __init__(self) -> None:
        self.containers: list[ContainerProbes] = []
        self.ports: set[int] = set()
        self.any_port = False
        self._names: set[str] = set()

    def read(self, container: Fields, *, init: bool) -> None:
        name = container.text("name")
        if not name or name in self._names:
            container.refuse("name", "is used twice" if name else "is missing")
            return
        self._names.add(name)
        named = _named_ports(container)
        restartable = init and container.raw("restartPolicy") == "Always"
        if init and not restartable:
            for field in ("startupProbe", "readinessProbe", "livenessProbe"):
                if container.has(field):
                    container.refuse(
                        field, "is not allowed on an init container without restartPolicy: Always"
                    )
            return
        probes = ContainerProbes(
            name=name,
            startup=self._probe(container, "startupProbe", named),
            readiness=self._probe(container, "readinessProbe", named),
            liveness=self._probe(container, "livenessProbe", named),
            restartable_init=restartable,
        )
        self.containers.append(probes)
        self._hooks(container, named)

    def _probe(self, container: Fields, name: str, named: dict[str, int]) -> Probe | None:
        if not container.has(name):
            return None
        probe = read_probe(container.child(name), named, readiness=name == "readinessProbe")
        if probe is not None:
            self._declare(probe.handler)
        return probe

    def _hooks(self, container: Fields, named: dict[str, int]) -> None:
        # Of the hooks that pkg/kubelet/lifecycle/handlers.go knows, only httpGet uses the network.
        lifecycle = container.child("lifecycle", reason="InvalidHook")
        for name in ("postStart", "preStop"):
            hook = lifecycle.child(name)
            if hook.has("httpGet"):
                handler = _read_http_get(hook.child("httpGet"), named, has_default_port=True)
                if handler is not None:
                    self._declare(handler)

    def _declare(self, handler: Handler) -> None:
        if not isinstance(handler, Exec):
            self.ports.add(handler.port)
        if isinstance(handler, HttpGet):
            self.any_port = True


def read_probe(fields: Fields, named_ports: dict[str, int], *, readiness: bool) -> Probe | None:
    """Read one probe of the API's shape; None if anything about it is wrong."""
    mistakes = len(fields.errors)
    handler = _read_handler(fields, named_ports)
    success_threshold = fields.integer("successThreshold", default=1, minimum=0) or 1
    if not readiness and success_threshold != 1:
        fields.refuse("successThreshold", f"must be 1 here, not {success_threshold}")
    grace: int | None = None
    if fields.has("terminationGracePeriodSeconds"):
        if readiness:
            fields.refuse("terminationGracePeriodSeconds", "is not allowed on a readiness probe")
        else:
            grace = fields.integer("terminationGracePeriodSeconds", default=1, minimum=1)
    probe_numbers = {
        "initial_delay_seconds": fields.integer("initialDelaySeconds", default=0, minimum=0),
        # As in the API, an explicit 0 of these means "not given".
        "timeout_seconds": fields.integer("timeoutSeconds", default=1, minimum=0) or 1,
        # Here the API takes 0 as 10: whoever writes 0 means something else, so podgate asks.
        "period_seconds": fields.integer("periodSeconds", default=10, minimum=1),
    }
    failure_threshold = fields.integer("failureThreshold", default=3, minimum=0) or 3
    if handler is None or len(fields.errors) != mistakes:
        return None
    return Probe(
        handler=handler,
        success_threshold=success_threshold,
        failure_threshold=failure_threshold,
        termination_grace_period_seconds=None if grace is None else float(grace),
        **{name: float(value) for name, value in probe_numbers.items()},
    )


_HANDLERS: Final = ("httpGet", "tcpSocket", "grpc", "exec")


def _read_handler(fields: Fields, named_ports: dict[str, int]) -> Handler | None:
    given = [name for name in _HANDLERS if fields.has(name)]
    if not given:
        fields.refuse(None, f"needs a handler: one of {', '.join(_HANDLERS)}")
        return None
    if len(given) > 1:
        fields.refuse(None, f"has {len(given)} handlers ({', '.join(given)}): keep one")
        return None
    child = fields.child(given[0])
    match given[0]:
        case "httpGet":
            return _read_http_get(child, named_ports)
        case "tcpSocket":
            _refuse_host(child)
            port = _read_port(child, named_ports)
            return None if port is None else TcpSocket(port)
        case "grpc":
            return _read_grpc(child)
        case _:
            return _read_exec(child)


def _read_http_get(
    fields: Fields, named_ports: dict[str, int], *, has_default_port: bool = False
) -> HttpGet | None:
    _refuse_host(fields)
    scheme = fields.choice("scheme", ("HTTP", "HTTPS"))
    if has_default_port and not fields.has("port"):
        # handlers.go has 80 for both; KEP-2771 means the scheme's own.
        port: int | None = 443 if scheme == "HTTPS" else 80
    else:
        port = _read_port(fields, named_ports)
    protocol = fields.choice("protocol", ("HTTP1", "HTTP2"))
    if protocol == "HTTP2" and scheme != "HTTP":
        fields.refuse("protocol", "may be HTTP2 only with scheme HTTP")
    headers: list[tuple[str, str]] = []
    for header in fields.children("httpHeaders"):
        name = header.text("name")
        if not _HEADER_NAME.fullmatch(name):
            header.refuse("name", f"must be letters, digits and dashes, not {clipped(name)}")
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
        fields.refuse("port", "must be a number: grpc probes cannot use port names")
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
        fields.refuse("command", "must be a list of at least one string")
        return None
    return Exec(tuple(str(word) for word in command))


def _refuse_host(fields: Fields) -> None:
    if fields.text("host"):
        fields.refuse("host", "must be empty: a probe goes to its own pod only", reason=HOST_REASON)


def _read_port(fields: Fields, named_ports: dict[str, int]) -> int | None:
    """A number, a port name of this container, or a number in quotes.

    The order of pkg/probe/util.go `ResolveContainerPort`.
    """
    value = fields.raw("port")
    if isinstance(value, str):
        if value in named_ports:
            return named_ports[value]
        if not (value.isascii() and value.isdigit() and len(value) <= 5):
            fields.refuse("port", f"names {clipped(value)}, which is no port of this container")
            return None
        value = int(value)
    if value is None:
        fields.refuse("port", "is missing")
    elif isinstance(value, bool) or not isinstance(value, int):
        fields.refuse("port", "must be a number or a port name")
    elif not 1 <= value <= PORT_MAX:
        fields.refuse("port", f"must be 1 to {PORT_MAX}")
    else:
        return value
    return None


def _named_ports(container: Fields) -> dict[str, int]:
    """The container's ports by name; the first of a name wins, as for the kubelet."""
    named: dict[str, int] = {}
    for port in container.children("ports"):
        name = port.text("name")
        number = port.raw("containerPort")
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= PORT_MAX:
            port.refuse("containerPort", f"must be a number from 1 to {PORT_MAX}")
        elif name:
            named.setdefault(name, number)
    return named
