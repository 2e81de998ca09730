"""`podgate pods`."""

import contextlib
import dataclasses
import pathlib
from typing import TYPE_CHECKING

import click

from agent.errors import AgentUnreachableError, PodgateError
from agent.operate.cli.commands import options

if TYPE_CHECKING:
    from agent.client import base


@click.command(short_help="Show pod conditions from all sources.")
@options.output
@options.namespace
@options.pod
@options.sort
@click.option("--watch", is_flag=True, help="Print again after each change, until interrupted.")
@click.option("--uid", default="", help="Show one pod, by its UID or its mirror pod's.")
@options.run_directory
def pods(
    output: options.Format,
    namespace: str,
    pod: str,
    sort: str,
    watch: bool,
    uid: str,
    run_directory: pathlib.Path,
) -> None:
    """Show the newest conditions of this node's pods, and the source of each.

    Needs neither root nor the API server. JSON and YAML have one document per state, in protobuf's
    JSON form, in the agent's order.
    """
    from agent.admin.client import ALIVE_SECONDS
    from agent.client import base
    from agent.client import podinfo as clients
    from agent.operate.cli import output as screens
    from agent.operate.cli.views import pods as view

    if watch and uid:
        raise click.UsageError("--watch shows all pods; leave out --uid")

    chosen = options.PodFilter(namespace, pod)

    def show(state: clients.PodInfoState) -> None:
        found = [one for one in state.pods if chosen.matches(one.pod_namespace, one.pod_name)]
        state = dataclasses.replace(state, pods=tuple(found))
        rows = screens.sort(view.rows(state), view.CONDITIONS, sort)
        screens.write(
            view.document(state), output, lambda screen: screen.table(view.CONDITIONS, rows)
        )

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
                found = client.get(uid, ALIVE_SECONDS)
                show(clients.PodInfoState(instance_id=0, rev=0, pods=(found,)))
            else:
                show(client.list(ALIVE_SECONDS))
        except base.StreamError as error:
            raise _failure(error, path) from error


def _failure(error: "base.StreamError", path: pathlib.Path) -> PodgateError:
    from agent.client import podinfo as clients

    if error.code is clients.UNAVAILABLE and not path.exists():
        return AgentUnreachableError(f"{path} does not exist; is 'podgate run' running?")
    if error.code in (clients.UNAVAILABLE, clients.DEADLINE_EXCEEDED):
        return AgentUnreachableError(f"no agent responds at {path}; is 'podgate run' running?")
    return PodgateError(str(error))
