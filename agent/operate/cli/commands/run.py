"""`podgate run`."""

import asyncio
import gc
import importlib
import ipaddress
import pathlib
from typing import Literal

import click

from agent.logs import LogFormat, LogLevel
from agent.operate.cli.commands import (
    cni,
    flow_options,
    options,
    policy_ready_options,
    service_options,
)
from agent.settings import (
    DEFAULT_RULE_GROUPS,
    NRI_SOCKET,
    ClusterNetworkPolicyMode,
    FeatureGates,
    FlowSettings,
    HostProbeMode,
    KubeletSetting,
    MetricsLevel,
    PolicyReadySettings,
    RawSocketMode,
    RelayRanges,
    ServiceSettings,
    Settings,
    parse_feature_gates,
    parse_kubelet,
)
from bpf import pins
from bpf.attachment import Attachment
from bpf.verdicts import Mode

# Shorter than any dead man's time in whole hours: a relay is not to outlive closed gates.
_MAX_ORPHAN_SECONDS = 3600


def _parse_groups(text: str) -> frozenset[str]:
    names = frozenset(_parse_names(text))
    if unknown := names - set(DEFAULT_RULE_GROUPS):
        raise ValueError(
            f"{', '.join(sorted(unknown))}: no such group of default rules; use "
            f"{', '.join(DEFAULT_RULE_GROUPS)}"
        )
    return names


def _parse_owners(text: str) -> pathlib.Path | Literal["api"] | None:
    if text == "api":
        return "api"
    return pathlib.Path(text) if text else None


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@click.command(short_help="Run the agent.")
@click.option(
    "--manifests",
    type=options.PATH,
    help="Directory of pod manifests (YAML or JSON), one pod per file; watched for changes.",
)
@click.option(
    "--standalone",
    "is_standalone",
    is_flag=True,
    help="For a kubelet without an API server: its static pods come from its pods API (feature "
    "gate PodsAPI), and their own labels decide their modes.",
)
@click.option(
    "--node-name",
    envvar="NODE_NAME",
    show_envvar=True,
    help="Name of this node in the cluster; its pods are watched at the API server.",
)
@options.own_namespace(
    "podgate's own namespace; its label podgate.io/max-mode is the ceiling of the cluster."
)
@click.option(
    "--pod-name",
    envvar="POD_NAME",
    show_envvar=True,
    help="Name of this agent's own pod; if a roll-out does not continue at it, a condition of that "
    "pod reminds the DaemonSet controller.",
)
@options.kubeconfig
@click.option(
    "--cri-socket",
    type=options.PATH,
    help="Socket of the container runtime. Default: the usual paths.",
)
@click.option(
    "--write-all-conditions",
    is_flag=True,
    help="Write conditions of all pods, not only of those with a readiness gate of podgate.",
)
@click.option(
    "--condition-owners",
    metavar="api|PATH",
    callback=options.parsed(_parse_owners),
    default="",
    help="Serve the Conditions API to the processes that ConditionOwners name, those of the API "
    "server (api) or of a file or directory. Default: not served.",
)
@click.option(
    "--rules",
    type=options.PATH,
    help="File or directory of HostAccessPolicies (YAML or JSON), in addition to the cluster's; "
    "watched for changes.",
)
@click.option(
    "--disable-default-rules",
    metavar="GROUP,...",
    callback=options.parsed(_parse_groups),
    default="",
    help=f"Groups of default rules to switch off: {', '.join(DEFAULT_RULE_GROUPS)}. Default: none; "
    "`podgate rules` lists the rules.",
)
@click.option(
    "--cluster-network-policies",
    type=click.Choice([choice.value for choice in ClusterNetworkPolicyMode]),
    default=ClusterNetworkPolicyMode.OFF.value,
    show_default=True,
    help="Report what ClusterNetworkPolicies mean for node traffic, or also close pods to their "
    "node, but for the kubelet and HostAccessPolicies, where one denies all ingress.",
)
@click.option(
    "--mode",
    type=click.Choice([mode.label for mode in Mode]),
    default=Mode.AUDIT.label,
    show_default=True,
    help="Mode of pods for which no podgate.io/mode label of pod, namespace or node decides.",
)
@click.option(
    "--max-mode",
    type=click.Choice([mode.label for mode in Mode]),
    default=Mode.STRICT.label,
    show_default=True,
    help="Ceiling of all modes, unless the node has the label podgate.io/max-mode.",
)
@click.option(
    "--http-address",
    metavar="HOST:PORT",
    callback=options.parsed(options.parse_address),
    default="127.0.0.1:9650",
    show_default=True,
    help="Address of /metrics, /healthz and /readyz; IPv6 in brackets, port 0 for any free port.",
)
@click.option(
    "--metrics-address",
    metavar="HOST:PORT",
    callback=options.parsed(options.parse_optional_address),
    help="Also serve /metrics over TLS at this address, to clients whose token may get /metrics "
    "by the RBAC of the cluster. Default: not served to other machines.",
)
@click.option(
    "--metrics-tls-cert",
    type=options.PATH,
    help="Certificate chain for --metrics-address (PEM), which may be renewed. Default: one that "
    "the agent signs itself.",
)
@click.option(
    "--metrics-tls-key",
    type=options.PATH,
    help="Its private key (PEM).",
)
@click.option(
    "--metrics",
    "metrics_level",
    type=click.Choice([choice.value for choice in MetricsLevel]),
    default="pod",
    show_default=True,
    help="Series of each pod, or added up by namespace or node.",
)
@click.option(
    "--attach",
    "attachment",
    type=click.Choice(["auto", *(choice.value for choice in Attachment)]),
    default="auto",
    show_default=True,
    help="Attachment type; auto prefers tcx.",
)
@click.option(
    "--kubelet",
    metavar="PROCESS",
    callback=options.parsed(parse_kubelet),
    default="process:kubelet",
    show_default=True,
    help="Kubelet to admit: process:NAME[:PORT], cgroup:/PATH or unit:NAME.service. By default "
    "also the process of k3s, MicroK8s or MicroShift that serves port 10250.",
)
@click.option(
    "--dead-man-hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    help="Open all gates after this many hours without a running agent; 0: never.",
)
@click.option(
    "--close-existing-flows",
    is_flag=True,
    help="Close flows that the host opened before enforcement. Default: only count them.",
)
@click.option(
    "--orphan-relay-seconds",
    type=click.FloatRange(0, _MAX_ORPHAN_SECONDS),
    default=600.0,
    show_default=True,
    help="In strict, how long the relay continues without an agent, which restarts or is upgraded; "
    "then strict falls back to enforce. 0: it ends with its agent.",
)
@click.option(
    "--strict-without-fallback",
    is_flag=True,
    help="In strict, drop the kubelet's connections while no relay serves: probes fail then. "
    "Default: strict falls back to enforce.",
)
@click.option(
    "--forwarding-interfaces",
    metavar="NAME,...",
    callback=options.parsed(_parse_names),
    default="",
    help="tun interfaces that carry traffic of other nodes or networks; * and ? are wildcards. "
    "Default: those with routes to networks behind them.",
)
@click.option(
    "--raw-sockets",
    type=click.Choice([choice.value for choice in RawSocketMode]),
    default=RawSocketMode.AUDIT.value,
    show_default=True,
    help="Raw and packet sockets of hostNetwork pods without a HostAccessPolicy: count them, or "
    "reject them.",
)
@click.option(
    "--kubelet-host-probes",
    type=click.Choice([choice.value for choice in HostProbeMode]),
    default=HostProbeMode.ALLOW.value,
    show_default=True,
    help="Connections of the kubelet to addresses that probes and hooks name as host: let them "
    "pass, or reject them, but for the API server's and for names.",
)
@click.option(
    "--probe-connect-every",
    metavar="PERIODS",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="In which periods a tcp probe connects; in the others the kernel's listeners are looked "
    "up, while nothing in the pod changes. 1: in all.",
)
@click.option(
    "--probe-certificates-dir",
    metavar="DIRECTORY",
    type=options.PATH,
    help="Client certificates for https and grpc probes: NAMESPACE/NAME/tls.crt, tls.key and "
    "ca.crt, for pods of that namespace.",
)
@options.relay_range4
@options.relay_range6
@click.option(
    "--nri-socket",
    type=options.PATH,
    default=NRI_SOCKET,
    show_default=True,
    help="NRI socket of the container runtime, which calls the agent for each new pod before its "
    "first container, where the socket exists.",
)
@click.option("--no-nri", is_flag=True, help="Do not use NRI.")
@cni.kept_conf_directory
@cni.bin_directory
@cni.strict_start
@service_options.run_options
@flow_options.run_options
@policy_ready_options.run_options
@click.option(
    "--standby-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="If another agent is running, take over from it, waiting up to this long; it stands by, "
    "and takes the node back if this one stops. 0: exit with an error.",
)
@click.option(
    "--pod-directory",
    type=options.PATH,
    help="Directory that is deleted with this agent's pod: the file 'ready' exists there while "
    "the agent holds the node and is ready, for an exec probe.",
)
@click.option(
    "--watchdog-seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Exit if the agent hangs for this long. 0: never.",
)
@click.option(
    "--feature-gates",
    metavar="NAME=true|false,...",
    callback=options.parsed(parse_feature_gates),
    default="",
    help="Feature gates: PodInfoAPI (default true) serves pod conditions to clients on this node. "
    "PodLifecycleHTTPS (default true) proxies https hooks into pods in enforce that the kubelet "
    "cannot reach.",
)
@options.log_format
@options.log_level
@options.run_directory
@options.bpffs
def run(
    manifests: pathlib.Path | None,
    is_standalone: bool,
    node_name: str | None,
    namespace: str,
    pod_name: str | None,
    kubeconfig: str | None,
    cri_socket: pathlib.Path | None,
    write_all_conditions: bool,
    condition_owners: pathlib.Path | Literal["api"] | None,
    rules: pathlib.Path | None,
    disable_default_rules: frozenset[str],
    cluster_network_policies: str,
    mode: str,
    max_mode: str,
    http_address: tuple[str, int],
    metrics_address: tuple[str, int] | None,
    metrics_tls_cert: pathlib.Path | None,
    metrics_tls_key: pathlib.Path | None,
    metrics_level: str,
    attachment: str,
    kubelet: KubeletSetting,
    dead_man_hours: float,
    close_existing_flows: bool,
    orphan_relay_seconds: float,
    strict_without_fallback: bool,
    forwarding_interfaces: tuple[str, ...],
    raw_sockets: str,
    kubelet_host_probes: str,
    probe_connect_every: int,
    probe_certificates_dir: pathlib.Path | None,
    relay_range4: ipaddress.IPv4Network,
    relay_range6: ipaddress.IPv6Network,
    nri_socket: pathlib.Path,
    no_nri: bool,
    cni_conf_dir: pathlib.Path | None,
    cni_bin_dir: pathlib.Path,
    cni_strict_start: bool,
    service_endpoints: ServiceSettings | None,
    flows: FlowSettings | None,
    policy_ready: PolicyReadySettings,
    standby_seconds: float,
    pod_directory: pathlib.Path | None,
    watchdog_seconds: float,
    feature_gates: FeatureGates,
    log_format: str,
    log_level: str,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Run the agent: gate and probe this node's pods until stopped."""
    from agent import logs
    from agent.app import preflight, program_loading
    from agent.linux import malloc, scheduling

    if [manifests is not None, node_name is not None, is_standalone].count(True) != 1:
        raise click.UsageError(
            "use one of --node-name NAME, for a node of a cluster, --standalone, for a kubelet "
            "without an API server, and --manifests DIRECTORY"
        )
    if condition_owners == "api" and node_name is None:
        raise click.UsageError(
            "--condition-owners=api needs --node-name: use a file of ConditionOwners instead"
        )
    if metrics_address and node_name is None:
        raise click.UsageError(
            "--metrics-address needs --node-name: its API server authorizes clients"
        )
    if cluster_network_policies != ClusterNetworkPolicyMode.OFF and node_name is None:
        raise click.UsageError(
            "--cluster-network-policies needs --node-name: they are objects of a cluster"
        )
    if (metrics_tls_cert is None) != (metrics_tls_key is None):
        raise click.UsageError("use --metrics-tls-cert and --metrics-tls-key together")
    if metrics_tls_cert and not metrics_address:
        raise click.UsageError("--metrics-tls-cert needs --metrics-address")
    settings = Settings(
        manifests=manifests,
        is_standalone=is_standalone,
        node_name=node_name,
        namespace=namespace,
        pod_name=pod_name,
        kubeconfig=kubeconfig,
        cri_socket=cri_socket,
        write_all_conditions=write_all_conditions,
        condition_owners=condition_owners,
        rules=rules,
        disabled_default_rules=disable_default_rules,
        cluster_network_policies=ClusterNetworkPolicyMode(cluster_network_policies),
        policy_ready=policy_ready,
        mode=Mode.from_label(mode),
        max_mode=Mode.from_label(max_mode),
        http_host=http_address[0],
        http_port=http_address[1],
        metrics_address=metrics_address,
        metrics_certificate=(metrics_tls_cert, metrics_tls_key)
        if metrics_tls_cert and metrics_tls_key
        else None,
        metrics_level=MetricsLevel(metrics_level),
        run_directory=run_directory,
        bpffs=bpffs,
        attachment=None if attachment == "auto" else Attachment(attachment),
        kubelet=kubelet,
        dead_man_hours=dead_man_hours,
        close_existing_flows=close_existing_flows,
        orphan_relay_seconds=orphan_relay_seconds,
        strict_without_fallback=strict_without_fallback,
        forwarding_interfaces=forwarding_interfaces,
        kubelet_host_probes=HostProbeMode(kubelet_host_probes),
        raw_sockets=RawSocketMode(raw_sockets),
        probe_connect_every=probe_connect_every,
        probe_certificates_directory=probe_certificates_dir,
        relay_ranges=RelayRanges(relay_range4, relay_range6),
        nri_socket=None if no_nri else nri_socket,
        cni_conf_directory=cni_conf_dir,
        cni_bin_directory=cni_bin_dir,
        cni_strict_start=cni_strict_start,
        service_endpoints=service_endpoints,
        flows=flows,
        standby_seconds=standby_seconds,
        pod_directory=pod_directory,
        watchdog_seconds=watchdog_seconds,
        feature_gates=feature_gates,
        log_format=LogFormat(log_format),
    )
    logs.configure(settings.log_format, LogLevel(log_level))
    preflight.check()
    malloc.keep_little()
    scheduling.shorten_slice()
    loading = program_loading.start(pins.Pins(settings.bpffs))
    # Half a second, during which the programs are loaded. Nothing of it is garbage.
    gc.disable()
    from agent.app import startup

    # With the source that this agent has.
    source = "cluster" if node_name else "standalone" if is_standalone else "manifest_source"
    importlib.import_module(f"agent.sources.{source}")
    gc.freeze()
    gc.enable()
    asyncio.run(startup.run(settings, loading))
