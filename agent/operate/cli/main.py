"""The command line. Commands import what they need when they run, so that `status` starts fast."""

import importlib
import sys
from typing import Any

import click

from agent import VERSION
from agent.errors import AgentUnreachableError, PodgateError
from bpf import errors

# Commands that are in a module of another's name; all others are in their own.
_MODULES = {"on": "off"}
_COMMANDS = (
    *("bugtool", "cleanup", "cni", "completion", "controller", "doctor", "drops", "explain", "hub"),
    *("maps", "metrics", "off", "on", "pods", "probe", "probes", "programs", "proxy", "relay"),
    *("rules", "run", "services", "status", "suggest", "webhook-certificate"),
)
_NO_AGENT = 3
_FAILURES = (PodgateError, errors.KernelSideError, OSError)


class _Podgate(click.Group):
    """Handles errors of every command: one sentence on stderr and exit status 1, 3 if no agent
    responds. Usage errors keep click's exit status 2. Only the command that runs is imported.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        name = cmd_name.replace("-", "_")
        module = _MODULES.get(name, name)
        found = getattr(importlib.import_module(f"agent.operate.cli.commands.{module}"), name)
        assert isinstance(found, click.Command)
        return found

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

    from agent.operate.demo import supervisor, view

    if output == "json":
        sys.exit(supervisor.run(view.JsonView()))
    console = rich.console.Console(highlight=False)
    sys.exit(supervisor.run(view.TextView(console, is_verbose=verbose)))
