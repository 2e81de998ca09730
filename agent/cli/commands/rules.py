"""The command lines of `podgate rules` and `podgate suggest`."""

import pathlib

import click

from agent.cli.commands import options


@click.command(short_help="Show the rules in force, for whom, and how often they were used.")
@options.output
@options.run_directory
def rules(output: str, run_directory: pathlib.Path) -> None:
    """Show each rule of each policy in force: its pods, its hits, and what is wrong."""
    content = options.ask_agent(run_directory, "/rules")
    if output == "json":
        click.echo(content)
    else:
        from agent.cli.views import status as status_view

        status_view.show_rules(content)


@click.command(short_help="Write the policies that would let in who is refused.")
@options.run_directory
def suggest(run_directory: pathlib.Path) -> None:
    """Write policies, as YAML, that would let in who is refused, or in audit would be.

    They are for kubectl apply, or for --rules, and let in all that was seen. Read them first:
    whoever should stay out is in there, too.
    """
    import msgspec
    import yaml

    from agent.admin.report import Drops
    from agent.policy import suggestions

    drops = msgspec.json.decode(options.ask_agent(run_directory, "/drops"), type=Drops)
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
