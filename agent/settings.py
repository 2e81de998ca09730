"""What `podgate run` can be told, with the reason for each default."""

import pathlib

import msgspec

from agent.featuregates import FeatureGates
from agent.kubelet.search import ByProcess, KubeletSetting
from agent.logs import LogFormat
from agent.strict.ranges import DEFAULT, RelayRanges
from bpf import pins
from bpf.gates import Attachment
from bpf.verdicts import Mode

RUN_DIRECTORY = pathlib.Path("/run/podgate")
CNI_CONF_DIRECTORY = pathlib.Path("/etc/cni/net.d")
CNI_BIN_DIRECTORY = pathlib.Path("/opt/cni/bin")


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

    end_older_flows: bool = False
    """Whether to end what the node began before a gate enforced. It breaks something once, so
    somebody has to ask for it."""

    relay_ranges: RelayRanges = DEFAULT
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
