"""The probes of a pod manifest."""

from collections.abc import Mapping

import msgspec

from probes.spec import networks, probespec
from probes.spec.apiprobes import ports_of, read_probe
from probes.spec.definitions import (
    PORT_MAX,
    ContainerPort,
    ContainerProbes,
    Exec,
    Grpc,
    Handler,
    HttpGet,
    NetworkHandler,
    Probe,
    TcpSocket,
)
from probes.spec.fields import FieldProblem, Fields
from probes.spec.handlers import KINDS, read_http_get

__all__ = [
    "ContainerPort",
    "ContainerProbes",
    "DeclaredPorts",
    "Exec",
    "FieldProblem",
    "Grpc",
    "Handler",
    "HttpGet",
    "PodHook",
    "PodSpec",
    "PortUser",
    "Probe",
    "ProbeHost",
    "TcpSocket",
    "parse_pod",
    "with_annotation",
]

HOOKS = ("postStart", "preStop")


class DeclaredPorts(msgspec.Struct, frozen=True):
    """The TCP ports of the pod that the kubelet may connect to for probes and hooks."""

    any_port: bool = False
    """An http or https probe or hook: the kubelet follows redirects to other ports."""
    ports: frozenset[int] = frozenset()
    """The ports named by probes and hooks, those of http too."""


class PortUser(msgspec.Struct, frozen=True):
    """A probe or hook of the manifest that connects to a port of the pod."""

    action: NetworkHandler
    container: str
    handler: str
    """startup, readiness, liveness, postStart or preStop."""

    @property
    def port(self) -> int:
        return self.action.port

    @property
    def is_hook(self) -> bool:
        return self.handler in HOOKS

    @property
    def is_https_hook(self) -> bool:
        return self.is_hook and isinstance(self.action, HttpGet) and self.action.scheme == "HTTPS"


class PodHook(msgspec.Struct, frozen=True):
    """A lifecycle hook of the manifest for which the kubelet connects to the pod."""

    container: str
    name: str
    """postStart or preStop."""
    handler: HttpGet


class ProbeHost(msgspec.Struct, frozen=True):
    """A probe or hook of the manifest with a `host`, to which the kubelet connects."""

    host: str
    port: int
    """0 if it is none."""
    container: str
    handler: str
    """As in PortUser."""


class PodSpec(msgspec.Struct, frozen=True):
    """The result of parse_pod: the valid probes, and the problems of the others."""

    containers: tuple[ContainerProbes, ...] = ()
    """The probes that podgate runs: the manifest's, replaced by those of the annotation."""
    base: tuple[ContainerProbes, ...] = ()
    """The manifest's own, which the kubelet runs."""
    named_ports: Mapping[str, Mapping[str, int]] = {}
    """By container that can be probed, by name."""
    container_ports: tuple[ContainerPort, ...] = ()
    """Of all containers that keep running."""
    annotation: str | None = None
    """The text of podgate.io/probe-spec."""
    networks: Mapping[str, str] = {}
    """The pod's further networks: interfaces by network."""
    declared: DeclaredPorts = DeclaredPorts()
    port_users: tuple[PortUser, ...] = ()
    """The probes and hooks of the manifest for which the kubelet connects, in the order written."""
    hooks: tuple[PodHook, ...] = ()
    hosts: tuple[ProbeHost, ...] = ()
    """Probes and hooks that send the kubelet elsewhere than to the pod."""
    host_network: bool = False
    errors: tuple[FieldProblem, ...] = ()

    def port_numbers(self, name: str, protocol: str) -> list[int]:
        """The ports with this name: of several containers, of a NetworkPolicy's all count."""
        return sorted(
            {
                port.number
                for port in self.container_ports
                if (port.name, port.protocol) == (name, protocol)
            }
        )


def parse_pod(pod: object) -> PodSpec:
    """Read the probes of a decoded pod manifest (YAML or JSON); never raises.

    All problems are collected; a probe with a problem is left out, the others stay. Probes on
    containers that run once are rejected as by the API. Probes of the annotation
    `podgate.io/probe-spec` replace those of the same container and type, but the kubelet still runs
    the latter, so `declared` is computed from those.
    """
    errors: list[FieldProblem] = []
    root = Fields(pod if pod is not None else "null", "", errors, reason="InvalidPod")
    if errors:
        return PodSpec(errors=(FieldProblem("", "InvalidPod", "the manifest is not an object."),))
    spec = root.child("spec")
    if not spec.has("containers"):
        spec.add_problem("containers", "is missing: a pod needs at least one container")
    spec.reason = "InvalidProbe"
    reader = _PodReader()
    for container in spec.children("initContainers"):
        reader.read(container, init=True)
    for container in spec.children("containers"):
        reader.read(container, init=False)
    annotations = root.child("metadata").child("annotations")
    annotation = annotations.raw(probespec.ANNOTATION)
    spec_without = PodSpec(
        base=tuple(reader.containers),
        named_ports=reader.named_ports,
        container_ports=tuple(reader.container_ports),
        networks=networks.read(annotations.raw(networks.STATUS_ANNOTATION)),
        declared=DeclaredPorts(reader.any_port, frozenset(reader.ports)),
        port_users=tuple(reader.port_users),
        hooks=tuple(reader.hooks),
        hosts=tuple(reader.hosts),
        host_network=spec.flag("hostNetwork"),
        errors=tuple(errors),
    )
    return with_annotation(spec_without, annotation if isinstance(annotation, str) else None)


def with_annotation(spec: PodSpec, text: str | None) -> PodSpec:
    """The same pod with this text of the annotation instead of the previous one."""
    errors = tuple(error for error in spec.errors if not probespec.is_annotation_error(error))
    own: dict[str, ContainerProbes] = {}
    if text is not None:
        try:
            own = probespec.read(text, spec.named_ports)
        except probespec.ProbeSpecError as error:
            errors += (error.error,)
    containers = tuple(_replaced(probes, own.get(probes.name)) for probes in spec.base)
    return msgspec.structs.replace(spec, containers=containers, annotation=text, errors=errors)


def _replaced(probes: ContainerProbes, own: ContainerProbes | None) -> ContainerProbes:
    if own is None:
        return probes
    return msgspec.structs.replace(
        probes,
        startup=_replaced_probe(probes.startup, own.startup),
        readiness=_replaced_probe(probes.readiness, own.readiness),
        liveness=_replaced_probe(probes.liveness, own.liveness),
    )


def _replaced_probe(base: Probe | None, own: Probe | None) -> Probe | None:
    """An answered probe is run at least as often as the kubelet reads its result: a failure that
    were read three times would restart a container for one lost packet."""
    if own is None or base is None or not own.answered:
        return own or base
    period = min(own.period_seconds, base.period_seconds)
    return msgspec.structs.replace(own, period_seconds=period)


def _number(port: object, named: dict[str, int]) -> int:
    """As the kubelet resolves it (pkg/probe/util.go); 0 if it is none. A hook's default is 80."""
    if port is None:
        return 80
    if isinstance(port, str):
        port = named.get(port) or (int(port) if port.isascii() and port.isdecimal() else 0)
    return port if type(port) is int and 1 <= port <= PORT_MAX else 0


class _PodReader:
    """Collects what the containers of one pod declare."""

    def __init__(self) -> None:
        self.containers: list[ContainerProbes] = []
        self.ports: set[int] = set()
        self.port_users: list[PortUser] = []
        self.any_port = False
        self.hooks: list[PodHook] = []
        self.hosts: list[ProbeHost] = []
        self.named_ports: dict[str, dict[str, int]] = {}
        self.container_ports: list[ContainerPort] = []
        self._names: set[str] = set()

    def read(self, container: Fields, *, init: bool) -> None:
        name = container.text("name")
        if not name or name in self._names:
            container.add_problem("name", "is used twice" if name else "is missing")
            return
        self._names.add(name)
        ports = ports_of(container)
        # The first of a name wins, as for the kubelet.
        named = {port.name: port.number for port in reversed(ports) if port.name}
        restartable = init and container.raw("restartPolicy") == "Always"
        if init and not restartable:
            for field in ("startupProbe", "readinessProbe", "livenessProbe"):
                if container.has(field):
                    container.add_problem(
                        field, "is not allowed on an init container without restartPolicy: Always"
                    )
            return
        self.named_ports[name] = named
        self.container_ports += ports
        probes = ContainerProbes(
            name=name,
            startup=self._probe(container, "startupProbe", named),
            readiness=self._probe(container, "readinessProbe", named),
            liveness=self._probe(container, "livenessProbe", named),
            restartable_init=restartable,
        )
        self.containers.append(probes)
        self._hooks(container, named)
        self._find_hosts(container, named)

    def _probe(self, container: Fields, name: str, named: dict[str, int]) -> Probe | None:
        if not container.has(name):
            return None
        probe = read_probe(container.child(name), named, readiness=name == "readinessProbe")
        if probe is not None:
            user = name.removesuffix("Probe")
            self._declare(probe.handler, container.text("name"), user)
        return probe

    def _hooks(self, container: Fields, named: dict[str, int]) -> None:
        # Of the hooks in pkg/kubelet/lifecycle/handlers.go, only httpGet uses the network.
        lifecycle = container.child("lifecycle", reason="InvalidHook")
        for name in HOOKS:
            hook = lifecycle.child(name)
            if hook.has("httpGet"):
                action = hook.child("httpGet")
                if action.text("host"):
                    continue  # The kubelet's alone, which goes elsewhere: it is one of `hosts`.
                handler = read_http_get(action, named, has_default_port=True)
                if handler is not None:
                    self.hooks.append(PodHook(container.text("name"), name, handler))
                    self._declare(handler, container.text("name"), name)

    def _find_hosts(self, container: Fields, named: dict[str, int]) -> None:
        lifecycle = container.raw("lifecycle")
        hooks = lifecycle if isinstance(lifecycle, dict) else {}
        # As in _hooks, and pkg/kubelet/prober/prober.go.
        with_host = tuple(name for name, kind in KINDS.items() if kind.has_host)
        actions = (
            ("startup", container.raw("startupProbe"), with_host),
            ("readiness", container.raw("readinessProbe"), with_host),
            ("liveness", container.raw("livenessProbe"), with_host),
            ("postStart", hooks.get("postStart"), ("httpGet",)),
            ("preStop", hooks.get("preStop"), ("httpGet",)),
        )
        for handler, given, kinds in actions:
            for kind in kinds:
                action = given.get(kind) if isinstance(given, dict) else None
                host = action.get("host") if isinstance(action, dict) else None
                if isinstance(action, dict) and isinstance(host, str) and host:
                    port = _number(action.get("port"), named)
                    self.hosts.append(ProbeHost(host, port, container.text("name"), handler))

    def _declare(self, handler: Handler, container: str, name: str) -> None:
        if not isinstance(handler, Exec):
            self.ports.add(handler.port)
            self.port_users.append(PortUser(handler, container, name))
        if isinstance(handler, HttpGet):
            self.any_port = True
