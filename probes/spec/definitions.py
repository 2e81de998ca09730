"""Probes and their handlers, as the rest of this package uses them."""

import ssl
from typing import Literal, Protocol

import msgspec

PORT_MAX = 65535

IpFamily = Literal["IPv4", "IPv6"]
IpFamilyPolicy = Literal["SingleStack", "PreferDualStack", "RequireDualStack"]


class CertificateName(msgspec.Struct, frozen=True):
    """A client certificate: of a Secret in the pod's namespace, or of a directory for the pod's
    namespace on the node."""

    secret: str = ""
    file: str = ""
    """Name of the directory. Exactly one of the two is given."""
    verifies_server: bool = False
    """Whether one of its authorities must have issued the server's certificate."""

    def __str__(self) -> str:
        if self.secret:
            return f"the Secret {self.secret} with a client certificate"
        return f"the directory {self.file} with a client certificate"


class ClientIdentity(Protocol):
    """A client certificate that can be used; probes/protocols/client_certificates.py has it."""

    def context(self, alpn: tuple[str, ...], ca_bundle: str) -> ssl.SSLContext:
        """The TLS context of connections with it."""
        ...


class TlsPolicy(msgspec.Struct, frozen=True):
    """What a probe requires of the server's certificate, and the one that it shows: the kubelet
    requires and shows nothing."""

    server_name: str = ""
    """Sent to the server, unless empty, and with a CA bundle required in its certificate."""
    ca_bundle: str = ""
    """Certificates in PEM, of which one must have issued the server's. Empty: not verified."""
    certificate: CertificateName | None = None
    identity: ClientIdentity | None = None
    """The certificate itself, once it is read; of plans only."""


class HttpGet(msgspec.Struct, frozen=True):
    """GET a path; 200 to 399 is healthy."""

    port: int
    path: str = "/"
    scheme: Literal["HTTP", "HTTPS"] = "HTTP"
    headers: tuple[tuple[str, str], ...] = ()
    """(name, value) as written: spelling, order and duplicates kept."""
    protocol: Literal["HTTP1", "HTTP2"] = "HTTP1"
    """HTTP2 is h2c by prior knowledge (KEP-5999)."""
    tls: TlsPolicy | None = None
    """None: any certificate, as for the kubelet."""
    statuses: tuple[tuple[int, int], ...] = ()
    """First and last status of each healthy range; empty: 200 to 399. A redirect with such a status
    is not followed."""
    body_contains: str = ""
    """What the first 10 KiB of the body must contain."""

    def __str__(self) -> str:
        return f"{self.scheme.lower()} :{self.port}{self.path}"


class TcpSocket(msgspec.Struct, frozen=True):
    """Connect; an open port is healthy."""

    port: int

    def __str__(self) -> str:
        return f"tcp :{self.port}"


class Grpc(msgspec.Struct, frozen=True):
    """Call grpc.health.v1.Health/Check; only SERVING is healthy."""

    port: int
    service: str = ""
    mode: Literal["Plaintext", "TLS"] = "Plaintext"
    """TLS does not verify the certificate (KEP-4939)."""
    tls: TlsPolicy | None = None

    def __str__(self) -> str:
        return f"grpc :{self.port} {self.service}".rstrip()


class Exec(msgspec.Struct, frozen=True):
    """A command inside the container: run by the kubelet, never by podgate."""

    command: tuple[str, ...]

    def __str__(self) -> str:
        return "exec"


class OtherNetwork(msgspec.Struct, frozen=True):
    """A further interface of the pod, by its name there or by the network that it belongs to."""

    interface: str = ""
    network: str = ""
    """`namespace/name` of the network's definition."""


NetworkHandler = HttpGet | TcpSocket | Grpc
"""Those that connect to a port of the pod. Each has its text, such as "http :8080/healthz"."""
Handler = NetworkHandler | Exec


class Probe(msgspec.Struct, frozen=True):
    """One probe: its handler, its period, and the thresholds of a change.

    Seconds are floats: the API has whole ones only, podgate's own probe specs go below.
    """

    handler: Handler
    initial_delay_seconds: float = 0.0
    timeout_seconds: float = 1.0
    period_seconds: float = 10.0
    success_threshold: int = 1
    failure_threshold: int = 3
    termination_grace_period_seconds: float | None = None
    """For the kubelet, which alone restarts containers; podgate only stores it."""
    ip_family: IpFamily | None = None
    """The family to probe; with a dual-stack policy, the first one."""
    ip_family_policy: IpFamilyPolicy | None = None
    """None: all the pod's addresses (or all of `ip_family`), and one success is enough."""
    target: Literal["pod", "localhost"] | OtherNetwork = "pod"
    """localhost, podgate's own extension: the pod's 127.0.0.1 and ::1 in place of its addresses. A
    further network: the addresses of its interface."""
    fail_when_listener_closes: bool = False
    """A listener that is confirmed as closed counts as `failure_threshold` failures."""
    answered: bool = False
    """In strict the kubelet's own probe of this type gets the latest result of this one. So it
    keeps running where the kubelet would wait for a restart."""


class ContainerPort(msgspec.Struct, frozen=True):
    """A port that a container declares. name: may be empty; protocol: TCP, UDP or SCTP."""

    name: str
    protocol: str
    number: int


class ContainerProbes(msgspec.Struct, frozen=True):
    """The probes of one regular or restartable init container."""

    name: str
    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None
    restartable_init: bool = False
