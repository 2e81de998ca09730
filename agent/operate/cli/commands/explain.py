"""`podgate explain`."""

import ipaddress
import pathlib
import sys

import click

from agent.operate.cli.commands import options
from bpf.abi import IPAddress

_PROTOCOLS = ("tcp", "udp", "sctp", "icmp", "icmpv6")


@click.group(invoke_without_command=True, short_help="Explain what happens to a flow or a pod.")
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    help="pid:PID, cgroup:PATH, unit:NAME, pod:[NAMESPACE/]NAME, ip:ADDRESS, or kernel.",
)
@click.option("--to", metavar="POD|ADDRESS", help="[NAMESPACE/]NAME of a pod, or its address.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="The pod's port; 0 for protocols without."
)
@click.option(
    "--protocol",
    type=click.Choice(_PROTOCOLS),
    default="tcp",
    show_default=True,
    help="Protocol of the flow.",
)
@click.option(
    "--source-port",
    type=click.IntRange(1, 65535),
    help="The source's port, for a packet that may be a reply to the pod.",
)
@click.option(
    "--source-address",
    metavar="ADDRESS",
    callback=options.parsed(lambda text: ipaddress.ip_address(text) if text else None),
    default="",
    help="With --source-port: where the pod sent its request, such as a service's address. "
    "Default: any of the node's addresses.",
)
@options.output
@options.run_directory
@options.bpffs
@click.pass_context
def explain(
    context: click.Context,
    source: str | None,
    to: str | None,
    port: int | None,
    protocol: str,
    source_port: int | None,
    source_address: IPAddress | None,
    output: options.Format,
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
) -> None:
    """Explain the verdict on a flow: the step that decides it, the rule, and what would change it.

    It evaluates the facts in force: the pinned maps, the attached programs and the source's
    cgroup. So it answers also while no agent runs. Nothing is sent, and nothing is changed.

    Exit status 0 if the flow passes, 1 if it is dropped.
    """
    if context.invoked_subcommand:
        if source or to:
            raise click.UsageError("--from and --to explain a flow; leave out the command")
        return
    if not source or not to:
        raise click.UsageError("a flow needs --from and --to; a pod: podgate explain pod NAME")
    from agent.operate.cli import explaining
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import explain as view
    from agent.operate.explain import flows, model
    from agent.operate.explain.sources import SourceName

    try:
        question = flows.Question(
            *(SourceName.parse(source), to, protocol, port or 0),
            source_port=source_port or 0,
            source_address=source_address,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found = explaining.flow(question, run_directory, bpffs)
    screens.write(found, output, lambda screen: view.show_flow(screen, found))
    sys.exit(1 if found.verdict == model.DROP else 0)


@explain.command(short_help="Explain why a pod is not ready, not isolated or not probed.")
@click.argument("name", metavar="[NAMESPACE/]NAME")
@options.output
@options.run_directory
@options.bpffs
def pod(
    name: str, output: options.Format, run_directory: pathlib.Path, bpffs: pathlib.Path
) -> None:
    """Check what a pod needs to be isolated, probed and ready, in order, and what to do next.

    Exit status 0 if all is well, 1 if not.
    """
    from agent.operate.cli import explaining
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import explain as view

    found = explaining.pod(name, run_directory, bpffs)
    screens.write(found, output, lambda screen: view.show_pod(screen, found))
    sys.exit(0 if found.is_well else 1)
