"""The command line. Commands import what they need when they run, so that `status` starts fast."""

import sys
from typing import Any

import click

from agent import VERSION
from agent.cli.commands import (
    bugtool,
    cleanup,
    cni,
    completion,
    controller,
    doctor,
    drops,
    explain,
    hub,
    maps,
    metrics,
    off,
    pods,
    probe,
    probes,
    programs,
    proxy,
    relay,
    rules,
    run,
    services,
    status,
    suggest,
)
from agent.errors import AgentUnreachableError, PodgateError
from bpf import errors

_NO_AGENT = 3
_FAILURES = (PodgateError, errors.KernelSideError, OSError)


class _Podgate(click.Group):
    """Handles errors of every command: one sentence on stderr and exit status 1, 3 if no agent
    responds. Usage errors keep click's exit status 2.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # by click: the reader of a pipe has gone
        except _FAILURES as error:
            click.echo(f"podgate: {error}", err=True)
            sys.exit(_NO_AGENT if isinstance(error, AgentUnreachableError) else 1)


@click.group(
    cls=_Podgate,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 96},
)
@click.version_option(VERSION, prog_name="podgate")
def main() -> None:
    """Close the kubelet hole in NetworkPolicy.

    Gates on pod interfaces drop traffic that the host starts; probes run inside each pod's network
    namespace; results are published as pod conditions.

    \b
    Exit status of every command:
      0  yes, or done
      1  no, or failed
      2  wrong usage
      3  no agent responds, and there is no other answer
    """


@main.command(short_help="Run the demo on this machine.")
@click.option(
    "--output",
    "-o",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every check, not only failed ones.")
def demo(output: str, verbose: bool) -> None:
    """Run the whole demo in its own namespaces, and remove them at the end.

    Six acts: the node without podgate, in audit, enforce and strict, with failures, and after the
    clean-up. With --output json progress is on stderr.
    """
    import rich.console

    from agent.demo import supervisor, view

    if output == "json":
        sys.exit(supervisor.run(view.JsonView()))
    console = rich.console.Console(highlight=False)
    sys.exit(supervisor.run(view.TextView(console, is_verbose=verbose)))


main.add_command(run.run)
main.add_command(controller.controller)
main.add_command(hub.hub)
main.add_command(status.status)
main.add_command(drops.drops)
main.add_command(pods.pods)
main.add_command(probe.probe)
main.add_command(rules.rules)
main.add_command(explain.explain)
main.add_command(suggest.suggest)
main.add_command(metrics.metrics)
main.add_command(maps.maps)
main.add_command(programs.programs)
main.add_command(bugtool.bugtool)
main.add_command(doctor.doctor)
main.add_command(cni.cni)
main.add_command(completion.completion)
main.add_command(cleanup.cleanup)
main.add_command(off.off)
main.add_command(off.on)
main.add_command(proxy.proxy)
main.add_command(probes.probes)
main.add_command(relay.relay)
main.add_command(services.services)
