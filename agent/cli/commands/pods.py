"""The command line of `podgate pods`."""

import contextlib
import pathlib

import click

from agent.cli.commands import options

_SECONDS = 10.0


@click.command(short_help="Show the conditions of this node's pods, and who says so.")
@options.output
@click.option("--watch", is_flag=True, help="Show them again whenever one changes.")
@click.option("--uid", default="", help="Show one pod only: by its uid, or its mirror pod's.")
@options.run_directory
def pods(output: str, watch: bool, uid: str, run_directory: pathlib.Path) -> None:
    """Show the conditions of this node's pods, the newest known, and who says so.

    For everybody on the node, root or not, and without the API server. With --output json one line
    for each state.
    """
    from agent.cli.views import pods as pods_view
    from agent.client import base
    from agent.client import podinfo as clients

    if watch and uid:
        raise click.UsageError("--watch shows all pods; leave out --uid")
    show = pods_view.write_json if output == "json" else pods_view.show
    path = run_directory / "podinfo" / "podinfo.sock"
    client = clients.Client(
        f"unix://{path.absolute()}", on_problem=lambda problem: click.echo(problem, err=True)
    )
    with contextlib.closing(client):
        try:
            if watch:
                with base.cancelled_by_signals(client.cancel):
                    for state in client:
                        show(state)
            elif uid:
                found = client.get(uid, _SECONDS)
                show(clients.State(instance_id=0, rev=0, pods=(found,)))
            else:
                show(client.list(_SECONDS))
        except clients.Broken as error:
            is_missing = error.code is clients.UNAVAILABLE and not path.exists()
            why = (
                f"{path} is not there; is 'podgate run' running, with its feature gate PodInfoAPI?"
                if is_missing
                else error
            )
            options.fail(why)
