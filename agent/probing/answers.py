"""Which of the kubelet's probes of a pod podgate answers, how they look, and why not the others.

A pod requests it by `answered: true` in its annotation `podgate.io/probe-spec`. The kubelet still
sends the probe of the pod's spec. The relay answers it only if the kubelet sends exactly these
bytes to this port for nothing else: what may be something else is proxied.
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from agent.relay.messages import Answer, GrpcRequest, HttpRequest, TcpConnect
from probes.engine import hooks
from probes.engine.targets import probe_of
from probes.engine.workers import ProbeType
from probes.protocols.http_get import PROBE_CLIENT, HttpClientProfile, HttpTarget
from probes.protocols.user_agents import PROBE_USER_AGENT
from probes.spec import probespec
from probes.spec.definitions import NetworkHandler
from probes.spec.specs import (
    Exec,
    Grpc,
    Handler,
    HttpGet,
    PodSpec,
    Probe,
    TcpSocket,
)

Request = HttpRequest | GrpcRequest | TcpConnect

# For requests that are only compared with each other, while the pod has no address: RFC 5737.
_ANY_ADDRESS = ("192.0.2.1",)


class Obstacle(enum.StrEnum):
    """Why a probe with `answered: true` is not answered; a label of metrics."""

    NO_PROBE = "no_probe"
    EXEC = "exec"
    TLS = "tls"
    HTTP2 = "http2"
    AMBIGUOUS = "ambiguous"
    SHARED_PORT = "shared_port"
    INVALID_SPEC = "invalid_spec"
    NOT_RELAYED = "not_relayed"
    NO_VERDICT = "no_verdict"
    STALE = "stale"


_SENTENCES = {
    Obstacle.NO_PROBE: "the pod's spec has no such probe, so the kubelet sends none",
    Obstacle.EXEC: "the kubelet's probe is exec and reaches no port",
    Obstacle.TLS: "the kubelet's probe is encrypted and cannot be recognised; use http in the "
    "pod's spec",
    Obstacle.HTTP2: "the kubelet's probe is HTTP/2 without TLS and cannot be recognised; use "
    "HTTP/1.1 in the pod's spec",
    Obstacle.AMBIGUOUS: "another probe or hook sends the same request with another check; give "
    "it a path or header of its own",
    Obstacle.SHARED_PORT: "the kubelet may connect to the port of this tcp probe for something "
    "else; use http or grpc in the pod's spec",
    Obstacle.INVALID_SPEC: "podgate rejects a probe of the pod's spec, so the kubelet may send "
    "the same for it",
}


class ProbeName(msgspec.Struct, frozen=True, order=True):
    """A probe within its pod."""

    container: str
    type: ProbeType

    def __str__(self) -> str:
        return f'Container "{self.container}": {self.type.lower()} probe'


@dataclasses.dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request of the kubelet that is answered. id: unique within the pod; probes: those that
    send it, and whose checks give its verdict; needs_pod: as in `Answer`."""

    id: int
    probes: tuple[ProbeName, ...]
    handler: NetworkHandler
    needs_pod: bool
    user_agent: str

    def answer(self, address: str) -> Answer:
        """What the relay compares connections to this address with."""
        request = request_of(self.handler, address, _client(self.user_agent))
        assert request is not None, "a request that cannot be sent is an obstacle"
        return Answer(self.id, self.handler.port, request, self.needs_pod)


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The probes of one pod that are to be answered."""

    requests: tuple[AnsweredRequest, ...] = ()
    obstacles: Mapping[ProbeName, Obstacle] = dataclasses.field(default_factory=dict)
    """Of probes that cannot be answered."""

    def id_of(self, name: ProbeName) -> int | None:
        """The answer to which this probe's checks belong."""
        return next((request.id for request in self.requests if name in request.probes), None)

    @property
    def problems(self) -> dict[ProbeName, str]:
        """One sentence for each probe that cannot be answered."""
        return {
            name: f"{name} is not answered: {_SENTENCES[obstacle]}."
            for name, obstacle in self.obstacles.items()
        }


def plan(spec: PodSpec, addresses: Sequence[str], user_agent: str = PROBE_USER_AGENT) -> AnswerPlan:
    """addresses: the pod's own, to which the relay proxies; user_agent: of the kubelet's probes."""
    pod = _Pod(spec, tuple(addresses) or _ANY_ADDRESS, _client(user_agent))
    obstacles: dict[ProbeName, Obstacle] = {}
    answered: dict[tuple[str, Handler], list[_Probe]] = {}
    for probe in pod.probes:
        if probe.check is None:
            continue
        if obstacle := pod.obstacle(probe):
            obstacles[probe.name] = obstacle
        else:
            assert probe.handler is not None
            answered.setdefault((probe.name.container, probe.handler), []).append(probe)
    names = {probe.name for probes in answered.values() for probe in probes}
    requests = tuple(
        AnsweredRequest(
            probes[0].id,
            tuple(probe.name for probe in probes),
            handler,
            needs_pod=bool(pod.users(handler.port) - {_user(name) for name in names}),
            user_agent=user_agent,
        )
        for (_, handler), probes in answered.items()
        if not isinstance(handler, Exec)
    )
    return AnswerPlan(requests, obstacles)


@dataclasses.dataclass(frozen=True, slots=True)
class _Probe:
    """A probe that the kubelet sends, or whose answer the pod requests.

    handler: the kubelet's, None if it has none; check: podgate's, None unless it is to answer.
    """

    id: int
    name: ProbeName
    handler: Handler | None
    check: Probe | None


class _Pod:
    """The requests that the kubelet sends to one pod."""

    def __init__(
        self, spec: PodSpec, addresses: tuple[str, ...], client: HttpClientProfile
    ) -> None:
        self.probes = list(_probes(spec))
        self._spec = spec
        self._addresses = addresses
        self._client = client
        self._has_invalid = any(not probespec.is_annotation_error(one) for one in spec.errors)

    def users(self, port: int) -> set[tuple[str, str]]:
        """Probes and hooks for which the kubelet connects to the port: container and handler."""
        users = self._spec.port_users
        return {(user.container, user.handler) for user in users if user.port == port}

    def obstacle(self, probe: _Probe) -> Obstacle | None:
        handler = probe.handler
        match handler:
            case None:
                return Obstacle.NO_PROBE
            case Exec():
                return Obstacle.EXEC
            case HttpGet(scheme="HTTPS") | Grpc(mode="TLS"):
                return Obstacle.TLS
            case HttpGet(protocol="HTTP2"):
                return Obstacle.HTTP2
        if self._has_invalid or not all(self._requests(handler)):
            return Obstacle.INVALID_SPEC
        same = [other for other in self.probes if _is_same_check(probe, other)]
        if isinstance(handler, TcpSocket):
            others = self.users(handler.port) - {_user(other.name) for other in same}
            if others or self._spec.declared.any_port:  # where redirects may lead
                return Obstacle.SHARED_PORT
            return None
        others_send_it = any(
            self._is_same_request(handler, other.handler, self._client)
            or _may_redirect_to(other.handler, handler)
            for other in self.probes
            if other not in same
        )
        hooks_send_it = any(
            self._is_same_request(handler, hook.handler, hooks.CLIENT) for hook in self._spec.hooks
        )
        return Obstacle.AMBIGUOUS if others_send_it or hooks_send_it else None

    def _requests(self, handler: Handler) -> list[Request | None]:
        return [request_of(handler, address, self._client) for address in self._addresses]

    def _is_same_request(
        self, one: HttpGet | Grpc, other: Handler | None, client: HttpClientProfile
    ) -> bool:
        """Whether the kubelet sends the same to one of the addresses."""
        if other is None or isinstance(other, Exec) or one.port != other.port:
            return False
        return any(
            request_of(one, address, self._client) == request_of(other, address, client)
            for address in self._addresses
        )


def _probes(spec: PodSpec) -> Iterator[_Probe]:
    base = {container.name: container for container in spec.base}
    for index, container in enumerate(spec.containers):
        for number, type in enumerate(ProbeType):
            check = probe_of(container, type)
            sent = probe_of(base.get(container.name), type)
            handler = sent.handler if sent else None
            is_answered = check is not None and check.answered
            if sent is not None or is_answered:
                name = ProbeName(container.name, type)
                number_of_all = index * len(ProbeType) + number
                yield _Probe(number_of_all, name, handler, check if is_answered else None)


def _is_same_check(one: _Probe, other: _Probe) -> bool:
    """Whether both are answered with the result of one check, so that it does not matter which of
    them the kubelet sends."""
    if one.name.container != other.name.container or one.handler != other.handler:
        return False
    return None not in (one.check, other.check) and _content(one.check) == _content(other.check)


def _content(check: Probe | None) -> tuple[object, ...]:
    """What decides the result of a check."""
    assert check is not None
    families = check.ip_family, check.ip_family_policy
    return (check.handler, check.target, *families, check.timeout_seconds)


def _may_redirect_to(other: Handler | None, handler: HttpGet | Grpc) -> bool:
    """Whether a redirect of the other probe may lead to exactly this request. Go's client adds a
    Referer to redirected requests, except from https to http (net/http/client.go refererForURL)."""
    return (
        isinstance(other, HttpGet)
        and isinstance(handler, HttpGet)
        and other.scheme == "HTTPS"
        and other.headers == handler.headers
    )


def _user(name: ProbeName) -> tuple[str, str]:
    """As `PortUser` has it."""
    return name.container, name.type.lower()


def _client(user_agent: str) -> HttpClientProfile:
    return msgspec.structs.replace(PROBE_CLIENT, user_agent=user_agent)


def request_of(handler: Handler, address: str, client: HttpClientProfile) -> Request | None:
    """What the kubelet sends to this address of a pod; None if it cannot be recognised."""
    match handler:
        case HttpGet():
            request = HttpTarget(handler, address, client).request
            if handler.scheme == "HTTPS" or not isinstance(request, bytes) or not request:
                return None
            return HttpRequest(request)
        case Grpc():
            return GrpcRequest(handler.service) if handler.mode == "Plaintext" else None
        case TcpSocket():
            return TcpConnect()
    return None
