"""The command lines of `podgate rules` and `podgate suggest`."""

import asyncio
import pathlib
import sys

import click

from agent.settings import RUN_DIRECTORY, admin_socket

_run_directory = click.option(
    "--run-directory",
    type=click.Path(path_type=pathlib.Path),
    default=RUN_DIRECTORY,
    show_default=True,
    help="Where the agent's sockets are.",
)


@click.command(short_help="Show the rules in force, for whom, and how often they were used.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@_run_directory
def rules(output: str, run_directory: pathlib.Path) -> None:
    """Show each rule of each policy in force: its pods, its hits, and what is wrong."""
    content = _fetch(run_directory, "/rules")
    if output == "json":
        click.echo(content)
    else:
        from agent import statusview

        statusview.show_rules(content)


@click.command(short_help="Write the policies that would let in who is refused.")
@_run_directory
def suggest(run_directory: pathlib.Path) -> None:
    """Write, as YAML for --rules, policies that would let in who is refused, or in audit would be.

    They let in all that was seen. Read them first: whoever should stay out is in there, too.
    """
    import msgspec
    import yaml

    from agent import suggestions
    from agent.status import Drops

    drops = msgspec.json.decode(_fetch(run_directory, "/drops"), type=Drops)
    policies, nameless = suggestions.suggest(drops.callers)
    for caller in nameless:
        who = caller.process or "a process"
        click.echo(
            f"podgate: {who} is left out: its cgroup was gone before it had a name.", err=True
        )
    if not policies:
        click.echo("podgate: there is nobody to suggest a policy for.", err=True)
    documents = (msgspec.to_builtins(policy) for policy in policies)
    click.echo(yaml.safe_dump_all(documents, sort_keys=False), nl=False)


def _fetch(run_directory: pathlib.Path, resource: str) -> bytes:
    from agent import adminclient

    try:
        return asyncio.run(adminclient.fetch(admin_socket(run_directory), resource))
    except adminclient.Unreachable as error:
        click.echo(f"podgate: {error}", err=True)
        sys.exit(1)
