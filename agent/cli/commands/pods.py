"""`podgate pods`."""

import contextlib
import pathlib

import click

from agent.cli.commands import options

_SECONDS = 10.0


@click.command(short_help="Show pod conditions from all sources.")
@options.output
@click.option("--watch", is_flag=True, help="Print again after each change, until interrupted.")
@click.option("--uid", default="", help="Show one pod, by its UID or its mirror pod's.")
@options.run_directory
def pods(output: options.Format, watch: bool, uid: str, run_directory: pathlib.Path) -> None:
    """Show the newest conditions of this node's pods, and the source of each.

    Needs neither root nor the API server. With --output json one line per state.
    """
    from agent.cli import output as screens
    from agent.cli.views import pods as pods_view
    from agent.client import base
    from agent.client import podinfo as clients
    from agent.errors import PodgateError

    if watch and uid:
        raise click.UsageError("--watch shows all pods; leave out --uid")

    def show(state: clients.PodInfoState) -> None:
        screens.write(pods_view.document(state), output, lambda _: pods_view.show(state))

    path = run_directory / "podinfo" / "podinfo.sock"
    client = clients.PodInfoClient(
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
                show(clients.PodInfoState(instance_id=0, rev=0, pods=(found,)))
            else:
                show(client.list(_SECONDS))
        except base.StreamError as error:
            is_missing = error.code is clients.UNAVAILABLE and not path.exists()
            raise PodgateError(
                f"{path} does not exist; run 'podgate run' with its feature gate PodInfoAPI."
                if is_missing
                else str(error)
            ) from error
