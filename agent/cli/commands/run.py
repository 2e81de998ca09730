"""The command line of `podgate run`."""

import asyncio
import ipaddress
import pathlib

import click

from agent.cli.commands import cni, options, services
from agent.logs import LogFormat
from agent.settings import (
    FeatureGates,
    KubeletSetting,
    RelayRanges,
    Settings,
    parse_feature_gates,
    parse_kubelet,
)
from bpf.gates import Attachment
from bpf.verdicts import Mode


def _parse_address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"{text!r} is not HOST:PORT; write for instance 127.0.0.1:9650 or [::1]:9650"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@click.command()
@click.option(
    "--manifests",
    type=options.PATH,
    help="Directory of pod manifests (YAML or JSON), one pod a file; followed while it changes.",
)
@click.option(
    "--node-name",
    envvar="NODE_NAME",
    show_envvar=True,
    help="This node's name in the cluster: its pods are those of the API server.",
)
@click.option(
    "--kubeconfig",
    metavar="FILE",
    help="How to reach the API server; else KUBECONFIG says it, or the pod's service account.",
)
@click.option(
    "--cri-socket",
    type=options.PATH,
    help="The container runtime's socket, if it is not where runtimes have theirs.",
)
@click.option(
    "--write-all-conditions",
    is_flag=True,
    help="Write conditions also of pods without one of podgate's readiness gates.",
)
@click.option(
    "--rules",
    type=options.PATH,
    help="HostAccessPolicies (YAML or JSON), beside the cluster's: a file, or a directory; "
    "followed while it changes.",
)
@click.option(
    "--mode",
    type=click.Choice([mode.label for mode in Mode]),
    default=Mode.AUDIT.label,
    show_default=True,
    help="For pods whose label podgate.io/mode says nothing.",
)
@click.option(
    "--http-address",
    metavar="HOST:PORT",
    callback=options.parsed(_parse_address),
    default="127.0.0.1:9650",
    show_default=True,
    help="For /metrics, /healthz and /readyz; an IPv6 host in brackets, port 0 for a free one.",
)
@click.option(
    "--attach",
    "attachment",
    type=click.Choice(["auto", *(choice.value for choice in Attachment)]),
    default="auto",
    show_default=True,
    help="How gates hang on interfaces; auto takes tcx where the kernel has it.",
)
@click.option(
    "--kubelet",
    metavar="WHO",
    callback=options.parsed(parse_kubelet),
    default="process:kubelet",
    show_default=True,
    help="Who may reach what pods declare: process:NAME[:PORT], cgroup:/PATH or unit:NAME.service.",
)
@click.option(
    "--dead-man-hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    help="After so long without an agent the gates let everything pass; 0 for never.",
)
@click.option(
    "--close-existing-flows",
    is_flag=True,
    help="End what the node began with a pod before its gate enforced; else it is only counted.",
)
@options.relay_range4
@options.relay_range6
@cni.kept_conf_directory
@cni.bin_directory
@cni.strict_start
@services.is_served
@services.address
@click.option(
    "--standby-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Where another agent runs, wait so long for its end, prepared; else that is an error.",
)
@click.option(
    "--started-file",
    type=options.PATH,
    help="Made when this agent has started or stands by: for a start-up probe.",
)
@click.option(
    "--feature-gates",
    metavar="NAME=true|false,...",
    callback=options.parsed(parse_feature_gates),
    default="",
    help="PodInfoAPI (true): who runs on the node may ask for the conditions of its pods.",
)
@options.log_format
@options.run_directory
@options.bpffs
def run(
    manifests: pathlib.Path | None,
    node_name: str | None,
    kubeconfig: str | None,
    cri_socket: pathlib.Path | None,
    write_all_conditions: bool,
    rules: pathlib.Path | None,
    mode: str,
    http_address: tuple[str, int],
    attachment: str,
    kubelet: KubeletSetting,
    dead_man_hours: float,
    close_existing_flows: bool,
    relay_range4: ipaddress.IPv4Network,
    relay_range6: ipaddress.IPv6Network,
    cni_conf_dir: pathlib.Path | None,
    cni_bin_dir: pathlib.Path,
    cni_strict_start: bool,
    service_endpoints: bool,
    localnet_address: tuple[str, int] | None,
    standby_seconds: float,
    started_file: pathlib.Path | None,
    feature_gates: FeatureGates,
    log_format: str,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Guard this node's pods until told to stop."""
    from agent import logs
    from agent.app import http_server, startup
    from agent.errors import PreflightError
    from agent.kube.client import NoClusterConfigError
    from agent.linux import locks
    from bpf import errors

    settings = Settings(
        manifests=manifests,
        node_name=node_name,
        kubeconfig=kubeconfig,
        cri_socket=cri_socket,
        write_all_conditions=write_all_conditions,
        rules=rules,
        mode=Mode.from_label(mode),
        http_host=http_address[0],
        http_port=http_address[1],
        run_directory=run_directory,
        bpffs=bpffs,
        attachment=None if attachment == "auto" else Attachment(attachment),
        kubelet=kubelet,
        dead_man_hours=dead_man_hours,
        close_existing_flows=close_existing_flows,
        relay_ranges=RelayRanges(relay_range4, relay_range6),
        cni_conf_directory=cni_conf_dir,
        cni_bin_directory=cni_bin_dir,
        cni_strict_start=cni_strict_start,
        service_endpoints=service_endpoints,
        localnet_address=localnet_address,
        standby_seconds=standby_seconds,
        started_file=started_file,
        feature_gates=feature_gates,
        log_format=LogFormat(log_format),
    )
    logs.configure(settings.log_format)
    try:
        asyncio.run(startup.run(settings))
    except (
        PreflightError,
        NoClusterConfigError,
        startup.StartError,
        locks.Locked,
        http_server.ListenError,
        errors.PinError,
        errors.CompileError,
    ) as error:
        options.fail(error)
