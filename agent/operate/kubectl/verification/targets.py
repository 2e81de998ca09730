"""The pods that a run tries to reach: its canaries, and pods whose owners opt in by a label."""

import dataclasses
from collections.abc import Iterable

from agent.labels import MODE_LABEL, OVERRIDE_ALLOWED, OVERRIDE_LABEL
from agent.operate.kubectl.cluster import Object
from agent.operate.kubectl.node_status import MODES
from agent.operate.kubectl.verification import canary

MOST_PORTS = 8
"""Of a pod's declared ones."""
_CLOSED = ("enforce", "strict")
# Discard and chargen: services that no image declares by chance.
_UNDECLARED = (9, 19)
_HANDLERS = ("httpGet", "tcpSocket", "grpc")


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """protocol: TCP, UDP, or ICMP with number 0."""

    protocol: str
    number: int
    is_declared: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A running pod. mode: what its labels want, whatever podgate does; kubelet: whether the
    kubelet's probes reach it, None if it has none."""

    namespace: str
    name: str
    uid: str
    mode: str
    addresses: tuple[str, ...]
    ports: tuple[Port, ...]
    kubelet: bool | None
    is_canary: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def is_to_be_closed(self) -> bool:
        return self.mode in _CLOSED


def of_pod(pod: Object, mode: str, *, is_canary: bool = False) -> Target | None:
    """None for a pod that cannot be tried: of the host network, without an address, or ending."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    addresses = tuple(one["ip"] for one in status.get("podIPs") or ())
    is_ending = bool(metadata.get("deletionTimestamp")) or status.get("phase") != "Running"
    if spec.get("hostNetwork") or not addresses or is_ending:
        return None
    is_probed = any(_is_probed(container) for container in spec["containers"])
    return Target(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        mode,
        addresses,
        _ports(spec, is_canary=is_canary),
        has_condition(pod, "ContainersReady") if is_probed else None,
        is_canary,
    )


def has_condition(pod: Object, kind: str) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any((one["type"], one["status"]) == (kind, "True") for one in conditions)


def label_mode(pod: Object, namespace: Object, node: Object, default: str) -> str:
    """By labels alone (docs/modes.md): what podgate makes of them, such as a ceiling, is what a run
    is to find. default: the agents'."""
    labels = namespace["metadata"].get("labels") or {}
    of_node = (node["metadata"].get("labels") or {}).get(MODE_LABEL)
    mode = _mode(labels.get(MODE_LABEL)) or _mode(of_node) or _mode(default) or "audit"
    own = _mode((pod["metadata"].get("labels") or {}).get(MODE_LABEL))
    if own and (_rank(own) > _rank(mode) or labels.get(OVERRIDE_LABEL) == OVERRIDE_ALLOWED):
        return own
    return mode


def default_mode(daemonset: Object | None) -> str:
    """Of the DaemonSet's arguments; empty without one."""
    if daemonset is None:
        return ""
    modes = [
        argument.partition("=")[2]
        for container in daemonset["spec"]["template"]["spec"]["containers"]
        for argument in container.get("args") or ()
        if argument.startswith("--mode=")
    ]
    return modes[-1] if modes else ""


def _mode(text: str | None) -> str:
    return text if text in MODES else ""


def _rank(mode: str) -> int:
    return MODES.index(mode)


def _ports(spec: Object, *, is_canary: bool) -> tuple[Port, ...]:
    declared = list(dict.fromkeys(_declared(spec["containers"])))[:MOST_PORTS]
    taken = {port.number for port in declared}
    free = (canary.UNDECLARED,) if is_canary else _UNDECLARED
    other = next(number for number in free if number not in taken)
    return (*declared, Port("TCP", other), Port("UDP", other), Port("ICMP", 0))


def _declared(containers: Iterable[Object]) -> Iterable[Port]:
    for container in containers:
        named = {}
        for one in container.get("ports") or ():
            port = Port(one.get("protocol") or "TCP", one["containerPort"], is_declared=True)
            named[one.get("name")] = port
            if port.protocol in ("TCP", "UDP"):
                yield port
        for handler in _network_handlers(container):
            port_or_name = handler.get("port")
            if isinstance(port_or_name, int):
                yield Port("TCP", port_or_name, is_declared=True)
            elif port_or_name in named:
                yield named[port_or_name]


def _is_probed(container: Object) -> bool:
    return any(True for _ in _network_handlers(container, ("readinessProbe",)))


def _network_handlers(
    container: Object, probes: Iterable[str] = ("startupProbe", "readinessProbe", "livenessProbe")
) -> Iterable[Object]:
    for name in probes:
        probe = container.get(name) or {}
        for kind in _HANDLERS:
            if handler := probe.get(kind):
                yield handler
