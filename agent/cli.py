"""The command line. Commands import what they need when they are called: `status` is quick."""

import asyncio
import contextlib
import ipaddress
import pathlib
import sys
from typing import NoReturn

import click

from agent import (
    VERSION,
    cnicommand,
    doctorcommand,
    featuregates,
    localnetcommand,
    podscommand,
    probecommand,
    proxycommand,
    relaycommand,
    relayoptions,
    rulescommand,
)
from agent.featuregates import FeatureGates
from agent.kubeletsearch import KubeletSetting, parse_setting
from agent.logs import LogFormat
from agent.relayranges import RelayRanges
from agent.settings import RUN_DIRECTORY, Settings, admin_socket
from bpf import pins
from bpf.gates import Attachment
from bpf.verdicts import Mode

_PATH = click.Path(path_type=pathlib.Path)

_run_directory = click.option(
    "--run-directory",
    type=_PATH,
    default=RUN_DIRECTORY,
    show_default=True,
    help="Where the agent's sockets are.",
)
_bpffs = click.option(
    "--bpffs",
    type=_PATH,
    default=pins.DEFAULT_BPFFS,
    show_default=True,
    help="The BPF file system to pin below.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96})
@click.version_option(VERSION, prog_name="podgate")
def main() -> None:
    """Closes the kubelet hole in NetworkPolicy.

    Gates on the pods' interfaces drop what the node itself starts; probes run from inside each
    pod's network namespace; conditions say what is true.
    """


@main.command()
@click.option(
    "--manifests",
    type=_PATH,
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
    type=_PATH,
    help="The container runtime's socket, if it is not where runtimes have theirs.",
)
@click.option(
    "--write-all-conditions",
    is_flag=True,
    help="Write conditions also of pods without one of podgate's readiness gates.",
)
@click.option(
    "--rules",
    type=_PATH,
    help="HostAccessPolicies (YAML or JSON): a file, or a directory; followed while it changes.",
)
@click.option(
    "--mode",
    type=click.Choice([mode.word for mode in Mode]),
    default=Mode.AUDIT.word,
    show_default=True,
    help="For pods whose label podgate.io/mode says nothing.",
)
@click.option(
    "--http-address",
    metavar="HOST:PORT",
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
    "--end-older-flows",
    is_flag=True,
    help="End what the node began with a pod before its gate enforced; else it is only counted.",
)
@relayoptions.range4
@relayoptions.range6
@cnicommand.kept_conf_directory
@cnicommand.bin_directory
@cnicommand.strict_start
@localnetcommand.is_served
@localnetcommand.address
@click.option(
    "--standby-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Where another agent runs, wait so long for its end, prepared; else that is an error.",
)
@click.option(
    "--started-file",
    type=_PATH,
    help="Made when this agent has started or stands by: for a start-up probe.",
)
@click.option(
    "--feature-gates",
    metavar="NAME=true|false,...",
    default="",
    help="PodInfoAPI (true): who runs on the node may ask for the conditions of its pods.",
)
@click.option(
    "--log-format",
    type=click.Choice([choice.value for choice in LogFormat]),
    default=LogFormat.JSON.value,
    show_default=True,
)
@_run_directory
@_bpffs
def run(
    manifests: pathlib.Path | None,
    node_name: str | None,
    kubeconfig: str | None,
    cri_socket: pathlib.Path | None,
    write_all_conditions: bool,
    rules: pathlib.Path | None,
    mode: str,
    http_address: str,
    attachment: str,
    kubelet: str,
    dead_man_hours: float,
    end_older_flows: bool,
    relay_range4: ipaddress.IPv4Network,
    relay_range6: ipaddress.IPv6Network,
    cni_conf_dir: pathlib.Path | None,
    cni_bin_dir: pathlib.Path,
    cni_strict_start: bool,
    service_endpoints: bool,
    localnet_address: tuple[str, int] | None,
    standby_seconds: float,
    started_file: pathlib.Path | None,
    feature_gates: str,
    log_format: str,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Guard this node's pods until told to stop."""
    from agent import daemon, http, locks, logs, preflight
    from agent.kube.client import NoCluster
    from bpf import errors

    host, port = _parse_address(http_address)
    settings = Settings(
        manifests=manifests,
        node_name=node_name,
        kubeconfig=kubeconfig,
        cri_socket=cri_socket,
        write_all_conditions=write_all_conditions,
        rules=rules,
        mode=Mode.from_word(mode),
        http_host=host,
        http_port=port,
        run_directory=run_directory,
        bpffs=bpffs,
        attachment=None if attachment == "auto" else Attachment(attachment),
        kubelet=_parse_kubelet(kubelet),
        dead_man_hours=dead_man_hours,
        end_older_flows=end_older_flows,
        relay_ranges=RelayRanges(relay_range4, relay_range6),
        cni_conf_directory=cni_conf_dir,
        cni_bin_directory=cni_bin_dir,
        cni_strict_start=cni_strict_start,
        service_endpoints=service_endpoints,
        localnet_address=localnet_address,
        standby_seconds=standby_seconds,
        started_file=started_file,
        feature_gates=_parse_feature_gates(feature_gates),
        log_format=LogFormat(log_format),
    )
    logs.configure(settings.log_format)
    try:
        asyncio.run(daemon.run(settings))
    except (
        preflight.Unfit,
        NoCluster,
        daemon.StartError,
        locks.Locked,
        http.ListenError,
        errors.PinError,
        errors.CompileError,
    ) as error:
        _fail(str(error))


@main.command()
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@_run_directory
def status(output: str, run_directory: pathlib.Path) -> None:
    """Show what the running agent knows about every pod."""
    from agent import adminclient, statusview

    try:
        content = asyncio.run(adminclient.fetch(admin_socket(run_directory), "/status"))
    except adminclient.Unreachable as error:
        _fail(str(error))
    if output == "json":
        click.echo(content)
    else:
        statusview.show(content)


@main.command(short_help="Show who of the node is refused, or would be.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--follow", is_flag=True, help="Show refusals as they happen instead: a sample.")
@_run_directory
def drops(output: str, follow: bool, run_directory: pathlib.Path) -> None:
    """Show who of the node is refused by a gate, or in audit would be: who would need a rule.

    One line for each sender, pod, protocol and port, the busiest first. With --follow one line for
    each refusal, until interrupted; the kernel tells no more than 160 a second of each CPU.
    """
    from agent import adminclient, following, statusview

    try:
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(following.follow(admin_socket(run_directory), as_json=output == "json"))
            return
        content = asyncio.run(adminclient.fetch(admin_socket(run_directory), "/drops"))
    except adminclient.Unreachable as error:
        _fail(str(error))
    if output == "json":
        click.echo(content)
    else:
        statusview.show_drops(content)


@main.command(short_help="Remove all that podgate ever left in the kernel.")
@_run_directory
@_bpffs
def cleanup(run_directory: pathlib.Path, bpffs: pathlib.Path) -> None:
    """Remove every pin, link, filter, table, route and relay's interface that podgate ever made on
    this node.

    All gates open, and services that a proxy of ours carried are not carried any more. Stop both
    first: they would put them back.
    """
    from agent import backstop, cnistate, locks, preflight, relaypair, unmanaged
    from agent.proxy import nftables
    from agent.proxy.backends import BackendError
    from bpf import cleanup as bpf_cleanup
    from bpf import errors

    installation = pins.Pins(bpffs)
    try:
        preflight.check()
        with (
            locks.exclusive_if_present(run_directory),
            locks.exclusive_if_present(run_directory / "proxy"),
            locks.exclusive_if_present(installation.root),
        ):
            cnistate.retire(run_directory)
            removed = bpf_cleanup.remove_everything(installation)
            asyncio.run(backstop.remove())
            asyncio.run(relaypair.remove_everything())
            asyncio.run(nftables.remove())
            unmanaged.let_in_again()
    except (
        preflight.Unfit,
        locks.Locked,
        errors.AttachError,
        backstop.BackstopError,
        relaypair.PairError,
        BackendError,
        OSError,
    ) as error:
        _fail(str(error))
    click.echo(f"Removed {removed.pins} pins and {removed.filters} filters.")


@main.command(short_help="Show the whole job on this machine.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def demo(output: str) -> None:
    """Show the whole job on this machine, in namespaces that end with it."""
    from agent.demo import supervisor

    sys.exit(supervisor.run(output))


main.add_command(podscommand.pods)
main.add_command(probecommand.probe)
main.add_command(rulescommand.rules)
main.add_command(rulescommand.suggest)
main.add_command(doctorcommand.doctor)
main.add_command(cnicommand.cni)
main.add_command(proxycommand.proxy)
main.add_command(relaycommand.probes)
main.add_command(relaycommand.relay)
main.add_command(localnetcommand.services)


def _parse_address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(
            f"{text!r} is not HOST:PORT; write for instance 127.0.0.1:9650 or [::1]:9650",
            param_hint="--http-address",
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def _parse_kubelet(text: str) -> KubeletSetting:
    try:
        return parse_setting(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--kubelet") from error


def _parse_feature_gates(text: str) -> FeatureGates:
    try:
        return featuregates.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--feature-gates") from error


def _fail(message: str) -> NoReturn:
    """One sentence on stderr, and exit status 1."""
    click.echo(f"podgate: {message}", err=True)
    sys.exit(1)
