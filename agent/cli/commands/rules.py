"""`podgate rules` and `podgate suggest`."""

import pathlib

import click

from agent.cli.commands import options


@click.command(short_help="Show the rules in force, their pods and their hits.")
@options.output
@options.run_directory
def rules(output: str, run_directory: pathlib.Path) -> None:
    """Show each rule of each policy in force: its pods, hits and problems."""
    content = options.fetch_from_agent(run_directory, "/rules")
    if output == "json":
        click.echo(content)
    else:
        from agent.cli.views import status as status_view

        status_view.show_rules(content)


@click.command(short_help="Generate HostAccessPolicies for traffic seen as dropped.")
@options.run_directory
def suggest(run_directory: pathlib.Path) -> None:
    """Print policies, as YAML for kubectl apply or --rules, that allow the traffic seen as dropped
    (in audit: would be dropped).

    Review them first: they allow unwanted sources, too.
    """
    import msgspec
    import yaml

    from agent.admin.report import Drops
    from agent.policy import suggestions

    drops = msgspec.json.decode(options.fetch_from_agent(run_directory, "/drops"), type=Drops)
    policies, nameless = suggestions.suggest(drops.sources)
    for source in nameless:
        process = source.process or "a process"
        click.echo(f"podgate: {process} is skipped: its cgroup no longer exists.", err=True)
    if not policies:
        click.echo("podgate: no dropped traffic to generate a policy for.", err=True)
    documents = (msgspec.to_builtins(policy) for policy in policies)
    click.echo(yaml.safe_dump_all(documents, sort_keys=False), nl=False)
