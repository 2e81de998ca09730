"""What `podgate run` can be told, with the reason for each default."""

import dataclasses
import ipaddress
import pathlib
from typing import Final

import msgspec

from agent.logs import LogFormat
from bpf import pins
from bpf.abi import IPNetwork
from bpf.gates import Attachment
from bpf.verdicts import Mode

RUN_DIRECTORY = pathlib.Path("/run/podgate")
CNI_CONF_DIRECTORY = pathlib.Path("/etc/cni/net.d")
CNI_BIN_DIRECTORY = pathlib.Path("/opt/cni/bin")

KUBELET_NAME = "kubelet"
_WORDS: Final = {"true": True, "false": False}

# Eight shares of 256 addresses, and for IPv6 what is usual for one link; the shortest are there to
# catch a slip of the pen.
_RANGE_LENGTHS = {4: (8, 21), 6: (16, 64)}
_RANGES = {4: "169.254.64.0/18", 6: "fd70:6f64:6761:7465::/64"}


class FeatureGates(msgspec.Struct, frozen=True, kw_only=True):
    """What is on, written as Kubernetes' components take it: `Name=true,Other=false`."""

    pod_info_api: bool = msgspec.field(default=True, name="PodInfoAPI")
    """The PodInfo socket (KEP-4188 names the gate)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ByProcess:
    """The kubelet is the process with this name, and, if given, with this TCP port."""

    name: str = KUBELET_NAME
    port: int | None = None

    def __str__(self) -> str:
        listening = "" if self.port is None else f" that listens on port {self.port}"
        return f"process named {self.name}{listening}"


@dataclasses.dataclass(frozen=True, slots=True)
class ByCgroup:
    """The kubelet is whatever runs in this cgroup, a path such as /system.slice/kubelet.service."""

    path: str

    def __str__(self) -> str:
        return f"cgroup {self.path}"


KubeletSetting = ByProcess | ByCgroup


@dataclasses.dataclass(frozen=True, slots=True)
class RelayRanges:
    """What is the relay's, and nobody else's, on this node."""

    ipv4: ipaddress.IPv4Network
    ipv6: ipaddress.IPv6Network

    @property
    def networks(self) -> tuple[IPNetwork, IPNetwork]:
        return self.ipv4, self.ipv6


DEFAULT_RELAY_RANGES = RelayRanges(
    ipaddress.IPv4Network(_RANGES[4]), ipaddress.IPv6Network(_RANGES[6])
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's settings. The command line fills them; nothing else changes them."""

    manifests: pathlib.Path | None = None
    """Directory of pod manifests (YAML or JSON), one pod a file: for nodes without a cluster."""

    node_name: str | None = None
    """This node's name in the cluster, whose API server says which pods are here. None: there are
    manifests instead."""

    kubeconfig: str | None = None
    """How to reach the API server; None: by KUBECONFIG, else as a pod does."""

    cri_socket: pathlib.Path | None = None
    """Of the container runtime that the kubelet uses; None: looked for where runtimes have it."""

    write_all_conditions: bool = False
    """Whether pods get conditions that carry no readiness gate for them. Nobody waits for those,
    and each is a write to the API server."""

    rules: pathlib.Path | None = None
    """A HostAccessPolicy file, or a directory of them, beside those of the cluster. None: those
    alone, and without a cluster the kubelet alone is let in."""

    mode: Mode = Mode.AUDIT
    """For pods whose `podgate.io/mode` label says nothing. Audit: a first run breaks nothing."""

    http_host: str = "127.0.0.1"
    """Metrics name pods, so they are for this node only until somebody decides otherwise."""

    http_port: int = 9650
    """0 takes a free port and logs it."""

    run_directory: pathlib.Path = RUN_DIRECTORY
    """Sockets and the lock that keeps a second agent away."""

    bpffs: pathlib.Path = pathlib.Path(pins.DEFAULT_BPFFS)
    """Programs, maps and links are pinned below it, so that gates outlive the agent."""

    attachment: Attachment | None = None
    """None: tcx where the kernel has it (6.6), else clsact."""

    kubelet: KubeletSetting = ByProcess()
    """Whose sockets are admitted to what pods declare: by its process, cgroup or unit."""

    dead_man_hours: float = 24.0
    """After so long without an agent everything passes, and says so: a node whose agent never comes
    back must not stay half-reachable for ever. 0: never."""

    close_existing_flows: bool = False
    """Whether to end what the node began before a gate enforced. It breaks something once, so
    somebody has to ask for it."""

    relay_ranges: RelayRanges = DEFAULT_RELAY_RANGES
    """Addresses of the relay's own, which only the node itself ever sees: link-local ones that
    nobody assigns by hand (RFC 3927 leaves out the first and the last 256), and unique local ones
    that spell its name."""

    cni_conf_directory: pathlib.Path | None = None
    """Where podgate-cni is kept in the node's CNI configuration. None: whoever runs the node
    decides about that directory."""

    cni_bin_directory: pathlib.Path = CNI_BIN_DIRECTORY
    """Where the container runtime looks for plugins."""

    cni_strict_start: bool = False
    """Whether pods wait for the gates after a reboot. Not by default: without an agent no pod would
    start."""

    service_endpoints: bool = False
    """Whether to watch all services of the cluster and tell what this node should use of each. Not
    by default: every node that does is one more reader of the API server's."""

    localnet_address: tuple[str, int] | None = None
    """Where on the loopback service endpoints are told as well as on their socket, for those who
    cannot mount it. None: nowhere."""

    feature_gates: FeatureGates = FeatureGates()
    """PodInfo is on: who reads it would else ask the API server, about pods beside it."""

    log_format: LogFormat = LogFormat.JSON
    """JSON: the lines are for a cluster's log collector first."""

    standby_seconds: float = 0.0
    """How long to wait, prepared, for the end of another agent on this node. 0: by hand a second
    agent is a mistake."""

    started_file: pathlib.Path | None = None
    """Made when this very agent has started or stands by. Over HTTP, on the node's network, the
    agent before it may be the one that answers."""

    @property
    def admin_socket(self) -> pathlib.Path:
        return admin_socket(self.run_directory)


def admin_socket(run_directory: pathlib.Path) -> pathlib.Path:
    """In a directory of its own: clients mount directories, since a socket is made anew."""
    return run_directory / "admin" / "admin.sock"


def localnet_socket(run_directory: pathlib.Path) -> pathlib.Path:
    """Where service endpoints are told."""
    return run_directory / "localnet" / "localnet.sock"


def parse_feature_gates(text: str) -> FeatureGates:
    """The gates that `text` sets, the others at their defaults. Raises `ValueError`."""
    known = ", ".join(field.encode_name for field in msgspec.structs.fields(FeatureGates))
    given: dict[str, bool] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, word = part.partition("=")
        if not separator or word.strip().lower() not in _WORDS:
            raise ValueError(f"{part!r} is not NAME=true or NAME=false")
        if name.strip() not in known.split(", "):
            raise ValueError(f"there is no feature gate {name.strip()!r}; known: {known}")
        given[name.strip()] = _WORDS[word.strip().lower()]
    return msgspec.convert(given, FeatureGates)


def parse_kubelet(text: str) -> KubeletSetting:
    """From `process:NAME[:PORT]`, `cgroup:/PATH` or `unit:NAME.service`. Raises `ValueError`."""
    kind, _, value = text.partition(":")
    if kind == "process":
        name, _, port = value.partition(":")
        if name and (not port or (port.isdecimal() and 0 < int(port) < 1 << 16)):
            return ByProcess(name, int(port) if port else None)
    elif kind == "cgroup":
        parts = [part for part in value.split("/") if part]
        if value.startswith("/") and parts and not {".", ".."} & set(parts):
            return ByCgroup("/" + "/".join(parts))
    elif kind == "unit" and value and "/" not in value:
        return ByCgroup(f"/system.slice/{value}")
    raise ValueError(
        f"{text!r} does not say who the kubelet is; write process:NAME, process:NAME:PORT, "
        "cgroup:/PATH or unit:NAME.service."
    )


def parse_range4(text: str) -> ipaddress.IPv4Network:
    """Raises `ValueError` with one sentence."""
    return ipaddress.IPv4Network(_parse_range(text, 4))


def parse_range6(text: str) -> ipaddress.IPv6Network:
    """Raises `ValueError` with one sentence."""
    return ipaddress.IPv6Network(_parse_range(text, 6))


def _parse_range(text: str, version: int) -> IPNetwork:
    shortest, longest = _RANGE_LENGTHS[version]
    hint = f"give an IPv{version} network of /{shortest} to /{longest}, such as {_RANGES[version]}"
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network ({error}); {hint}") from error
    if network.version != version or not shortest <= network.prefixlen <= longest:
        raise ValueError(f"{text} does not do for the relay; {hint}")
    if network.is_multicast or network.is_loopback:
        raise ValueError(f"{text} cannot be routed to the relay; {hint}")
    return network
