"""Settings of `podgate run`. Each field documents the reason for its default."""

import dataclasses
import enum
import ipaddress
import pathlib
from typing import Literal

import msgspec

from agent.logs import LogFormat
from bpf import pins
from bpf.abi import IPNetwork
from bpf.attachment import Attachment
from bpf.verdicts import Mode

RUN_DIRECTORY = pathlib.Path("/run/podgate")
CNI_CONF_DIRECTORY = pathlib.Path("/etc/cni/net.d")
CNI_BIN_DIRECTORY = pathlib.Path("/opt/cni/bin")
NRI_SOCKET = pathlib.Path("/run/nri/nri.sock")
"""/var/run/nri/nri.sock of containerd and CRI-O (NRI's DefaultSocketPath); /var/run is /run."""

DEFAULT_RULE_GROUPS = ("api-server", "node-dns", "cni", "storage", "ingress", "metrics")
"""Rules of podgate's own, which can be switched off (agent/policy/default_rules.py)."""

KUBELET_NAME = "kubelet"
_WORDS = {"true": True, "false": False}

# IPv4: at least eight shares of 256 addresses. IPv6: at least one link's usual /64. The shortest
# lengths catch a typing error.
_RANGE_LENGTHS = {4: (8, 21), 6: (16, 64)}
_RANGES = {4: "169.254.64.0/18", 6: "fd70:6f64:6761:7465::/64"}


class FeatureGates(msgspec.Struct, frozen=True, kw_only=True):
    """Feature gates, written as for Kubernetes components: `Name=true,Other=false`."""

    pod_info_api: bool = msgspec.field(default=True, name="PodInfoAPI")
    """Serve the PodInfo socket (KEP-4188 names the gate)."""
    pod_lifecycle_https: bool = msgspec.field(default=True, name="PodLifecycleHTTPS")
    """Carry https hooks into pods in enforce that the kubelet cannot reach (KEP-2771 names the
    gate). The kubelet sends them in any case, and a postStart hook that fails restarts its
    container: so without the gate they are still admitted, and proxied in strict."""


@dataclasses.dataclass(frozen=True, slots=True)
class ByProcess:
    """The kubelet is the process with this name and, if given, this listening TCP port."""

    name: str = KUBELET_NAME
    port: int | None = None

    def __str__(self) -> str:
        listening = "" if self.port is None else f" that listens on port {self.port}"
        return f"process named {self.name}{listening}"


@dataclasses.dataclass(frozen=True, slots=True)
class ByCgroup:
    """The kubelet runs in the cgroup with this path, such as /system.slice/kubelet.service."""

    path: str

    def __str__(self) -> str:
        return f"cgroup {self.path}"


KubeletSetting = ByProcess | ByCgroup


@dataclasses.dataclass(frozen=True, slots=True)
class RelayRanges:
    """Address ranges that only the relay uses on this node."""

    ipv4: ipaddress.IPv4Network
    ipv6: ipaddress.IPv6Network

    @property
    def networks(self) -> tuple[IPNetwork, IPNetwork]:
        return self.ipv4, self.ipv6


DEFAULT_RELAY_RANGES = RelayRanges(
    ipaddress.IPv4Network(_RANGES[4]), ipaddress.IPv6Network(_RANGES[6])
)


class RawSocketMode(enum.StrEnum):
    """What happens to raw and packet sockets of pods' containers in the host's namespace."""

    AUDIT = "audit"
    """They are counted and reported."""
    DENY_PODS = "deny-pods"
    """They are rejected, unless a HostAccessPolicy names the container's cgroup."""


class HostProbeMode(enum.StrEnum):
    """What happens to the kubelet's connections to the `host` of a probe or hook."""

    ALLOW = "allow"
    """They pass. Pods with such probes are reported in any case."""
    DENY = "deny"
    """They are rejected, so that these probes fail."""


class ClusterNetworkPolicyMode(enum.StrEnum):
    """What the agent does about ClusterNetworkPolicies (policy.networking.k8s.io/v1alpha2)."""

    OFF = "off"
    """It does not read them."""
    OBSERVE = "observe"
    """It reads them, and reports what they mean for node traffic."""
    CLOSE = "close"
    """It also closes the host side of pods of which they deny all ingress."""


class PolicyReadyMode(enum.StrEnum):
    """What the agent does about the readiness gate `podgate.io/policy-ready` of pods."""

    OFF = "off"
    """It checks no policies, and the condition is False."""
    WAIT = "wait"
    """The condition is True once the pod's network policies are seen to be in force."""
    READY = "ready"
    """It also becomes True after the time-out."""


class PolicyReadySettings(msgspec.Struct, frozen=True):
    """How policies are checked. timeout_seconds: from a pod's network on; then its condition is a
    finding."""

    mode: PolicyReadyMode = PolicyReadyMode.OFF
    timeout_seconds: float = 60.0


class MetricsLevel(enum.StrEnum):
    """What metrics of pods are added up to."""

    NODE = "node"
    NAMESPACE = "namespace"
    POD = "pod"
    """Each pod has its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class TlsPaths:
    """Files of mutual TLS, PEM: the authority of the other side, the own certificate and key."""

    authorities: pathlib.Path
    certificate: pathlib.Path
    key: pathlib.Path


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of service endpoints."""

    source: pathlib.Path | tuple[str, ...] | None = None
    """A file or directory, or servers of other nodes as HOST:PORT. None: the API server, which has
    the newest state but serves each node by itself."""

    node: str = ""
    """Name of the node in endpoints, on a node without a cluster."""

    zone: str = ""
    """Its zone, likewise. Empty: hints for zones are not followed."""

    address: tuple[str, int] | None = None
    """Loopback address that serves service endpoints in addition to their socket, for clients that
    cannot mount it. None: the socket only."""

    listen: tuple[str, int] | None = None
    """Address that serves other nodes. None: only this node's processes are served."""

    tls: TlsPaths | None = None
    """Certificates for servers of other nodes and for `listen`."""

    state: pathlib.Path | None = None
    """File of the saved state. None: in the run directory, which a reboot empties."""


class FlowFileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a file of records of flows."""

    path: pathlib.Path
    max_bytes: int = 100 << 20
    """Of one file: some 250,000 records."""
    files: int = 5
    """With the current one: at most half a gigabyte."""


class FlowOtlpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an OTLP receiver of records of flows."""

    url: str
    headers: pathlib.Path | None = None
    """File of lines `Name: value`."""
    authority: pathlib.Path | None = None
    """File of PEM certificates. None: the system's."""


class FlowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of records of flows."""

    output: FlowFileSettings | FlowOtlpSettings | None
    """None: standard output."""
    interval_seconds: float = 10.0
    """Between records of one flow; a full aggregate takes a tenth of a second to read."""
    drops_per_second: int = 0
    """Records of single drops, at most."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one agent, set by the command line and never changed afterwards."""

    manifests: pathlib.Path | None = None
    """Directory of pod manifests (YAML or JSON), one pod per file, for nodes without a cluster."""

    is_standalone: bool = False
    """Whether pods come from a kubelet without an API server."""

    node_name: str | None = None
    """This node's name in the cluster; its pods are watched at the API server. None: the node
    is in no cluster."""

    namespace: str = "podgate"
    """podgate's own namespace, whose label podgate.io/max-mode is the ceiling of the cluster."""

    pod_name: str | None = None
    """Name of this agent's own pod, of which a roll-out is observed. None: it has none."""

    kubeconfig: str | None = None
    """kubeconfig file. None: KUBECONFIG, or the pod's service account."""

    cri_socket: pathlib.Path | None = None
    """Socket of the kubelet's container runtime. None: the first of the usual paths that exists."""

    write_all_conditions: bool = False
    """Whether to write conditions of pods without a readiness gate of podgate, too. Off: nothing
    waits for those, and each is a write to the API server."""

    condition_owners: pathlib.Path | Literal["api"] | None = None
    """Where ConditionOwners are: the API server, or a file or directory. None: the Conditions API
    is not served, since a node serves no more than is used; what it wrote is removed from pods."""

    cluster_network_policies: ClusterNetworkPolicyMode = ClusterNetworkPolicyMode.OFF
    """Off: each node would watch all of them and all NetworkPolicies, which is load of the API
    server for clusters that have none, and needs rights that only the chart's value adds."""

    policy_ready: PolicyReadySettings = PolicyReadySettings()
    """Off: it needs a witness on each node, the watch of all NetworkPolicies, and rights that only
    the chart's value adds."""

    rules: pathlib.Path | None = None
    """File or directory of HostAccessPolicies, in addition to those of the cluster. None: those of
    the cluster only; without a cluster only the kubelet is admitted."""

    disabled_default_rules: frozenset[str] = frozenset()
    """Groups of podgate's default rules that are not in force (agent/policy/default_rules.py).
    None: a cluster works under enforce without a policy for what each cluster has."""

    mode: Mode = Mode.AUDIT
    """Mode of pods for which no label decides. Audit: a first run drops nothing."""

    max_mode: Mode = Mode.STRICT
    """The ceiling of all modes, also of labels. Strict: all labels have their effect; less is for
    canaries and emergencies."""

    http_host: str = "127.0.0.1"
    """Loopback, since metrics contain pod names: other machines read them only if so configured."""

    http_port: int = 9650
    """0: any free port, which is logged."""

    metrics_address: tuple[str, int] | None = None
    """Address that serves metrics to other machines, over TLS, to clients that the API server
    authorizes. None: this machine only."""

    metrics_certificate: tuple[pathlib.Path, pathlib.Path] | None = None
    """Files of the certificate and key for it, which may be renewed. None: one that the agent makes
    at its start and nothing trusts, so that it encrypts and proves nothing."""

    metrics_level: MetricsLevel = MetricsLevel.POD
    """Some 50 series for each pod name what is dropped or probed late; a thousand nodes afford
    less."""

    run_directory: pathlib.Path = RUN_DIRECTORY
    """Sockets, saved state, and the lock that excludes a second agent."""

    bpffs: pathlib.Path = pathlib.Path(pins.DEFAULT_BPFFS)
    """BPF file system in which programs, maps and links are pinned: gates outlive the agent."""

    attachment: Attachment | None = None
    """None: tcx if the kernel has it (6.6), otherwise clsact."""

    kubelet: KubeletSetting = ByProcess()
    """Kubelet whose sockets are admitted to the ports that pods declare."""

    dead_man_hours: float = 24.0
    """All gates open after this many hours without an agent, and count it: a node whose agent never
    returns must not stay half-reachable. 0: never."""

    close_existing_flows: bool = False
    """Whether to close flows that the host opened before enforcement. Off: it interrupts each such
    process once, so the operator decides."""

    forwarding_interfaces: tuple[str, ...] = ()
    """Names (with wildcards) of tun interfaces from which packets count as forwarded. None: a tun
    interface with routes to other networks is found by itself."""

    kubelet_host_probes: HostProbeMode = HostProbeMode.ALLOW
    """Denied, a healthy pod whose liveness probe has a host restarts."""

    raw_sockets: RawSocketMode = RawSocketMode.AUDIT
    """Raw and packet sockets that containers of hostNetwork pods create. Audit: the network's own
    pods use them, and need policies first."""

    probe_connect_every: int = 30
    """In which periods a tcp probe connects though a lookup of the listener would do. What only a
    connection sees and nothing reports, such as rules of iptables' legacy variant, is seen after
    300 s with the default period, as by the agent's resync; a connection costs as much as 20 to 30
    lookups. 1: in all."""

    probe_certificates_directory: pathlib.Path | None = None
    """Client certificates for probes, in NAMESPACE/NAME of this directory. None: the node offers
    none."""

    relay_ranges: RelayRanges = DEFAULT_RELAY_RANGES
    """Addresses of the relay, which never leave the node: link-local ones, which are not assigned
    by hand (RFC 3927 reserves the first and the last 256), and unique local ones that spell
    podgate."""

    orphan_relay_seconds: float = 600.0
    """How long a relay continues without an agent: longer than a node takes to start another one,
    also where the image has to be pulled. If none starts, strict becomes enforce as always."""

    strict_without_fallback: bool = False
    """Whether pods in strict never admit the kubelet at their gates, so that their probes fail
    while no relay serves. Off: healthy pods would restart whenever the relay does."""

    cni_conf_directory: pathlib.Path | None = None
    """CNI configuration directory in which podgate-cni stays configured. None: the operator manages
    that directory."""

    cni_bin_directory: pathlib.Path = CNI_BIN_DIRECTORY
    """Plugin directory of the container runtime."""

    cni_strict_start: bool = False
    """Whether pods wait for the agent after a reboot. Off: without an agent no pod would start."""

    nri_socket: pathlib.Path | None = NRI_SOCKET
    """Socket of the container runtime's NRI, which calls the agent for each new pod before its
    first container. Used where it exists: it needs no file of another product. None: off."""

    service_endpoints: ServiceSettings | None = None
    """Whether to publish this node's endpoints of each service. None: each node that watches all
    services of the cluster is one more client of the API server."""

    flows: FlowSettings | None = None
    """None: flows have no records; reports and metrics have them."""

    feature_gates: FeatureGates = FeatureGates()
    """PodInfo is on: its clients would otherwise query the API server about pods of this node."""

    log_format: LogFormat = LogFormat.JSON
    """JSON: the lines go to a log collector first."""

    standby_seconds: float = 0.0
    """How long to stand by while another agent runs on this node and does not hand it over. 0: a
    second agent that is started by hand is an error."""

    pod_directory: pathlib.Path | None = None
    """Directory that lives as long as this agent's pod, for its readiness and its age. An HTTP
    probe on the node's network may be answered by another agent instead."""

    watchdog_seconds: float = 60.0
    """An agent whose event loop hangs for this long exits. As long as six failed liveness probes;
    gates do not need it meanwhile. 0: never."""

    @property
    def admin_socket(self) -> pathlib.Path:
        return admin_socket(self.run_directory)


def admin_socket(run_directory: pathlib.Path) -> pathlib.Path:
    """In its own directory: clients mount directories, since a socket is created again."""
    return run_directory / "admin" / "admin.sock"


def localnet_socket(run_directory: pathlib.Path) -> pathlib.Path:
    """Socket of the service endpoints API."""
    return run_directory / "localnet" / "localnet.sock"


def parse_feature_gates(text: str) -> FeatureGates:
    """Feature gates with those that `text` sets; the others keep their defaults.

    Raises `ValueError`.
    """
    names = ", ".join(field.encode_name for field in msgspec.structs.fields(FeatureGates))
    given: dict[str, bool] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, word = part.partition("=")
        if not separator or word.strip().lower() not in _WORDS:
            raise ValueError(f"{part!r} is not NAME=true or NAME=false")
        if name.strip() not in names.split(", "):
            raise ValueError(f"unknown feature gate {name.strip()!r}; known: {names}")
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
        f"{text!r} does not name a kubelet; write process:NAME, process:NAME:PORT, "
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
    hint = f"use an IPv{version} network of /{shortest} to /{longest}, such as {_RANGES[version]}"
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network ({error}); {hint}") from error
    if network.version != version or not shortest <= network.prefixlen <= longest:
        raise ValueError(f"{text} cannot be used for the relay; {hint}")
    if network.is_multicast or network.is_loopback:
        raise ValueError(f"{text} cannot be routed to the relay; {hint}")
    return network
