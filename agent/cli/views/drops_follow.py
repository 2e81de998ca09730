"""`podgate drops --follow`: asks the agent on and on for what is new."""

import asyncio
import pathlib

import click
import msgspec

from agent.admin import client as admin_client
from agent.admin.report import Refusals
from agent.cli.views import status as status_view

_PERIOD_SECONDS = 0.5


async def follow(socket: pathlib.Path, *, as_json: bool) -> None:
    """Print refusals from now on, until interrupted. Raises `Unreachable` when the agent ends."""
    newest = (await _fetch(socket, 0)).newest
    while True:
        refusals = await _fetch(socket, newest)
        if refusals.newest < newest:
            newest = 0  # another agent, which counts from the beginning
            continue
        newest = refusals.newest
        if as_json:
            for one in refusals.refusals:
                click.echo(msgspec.json.encode(one))
        else:
            status_view.show_refusals(refusals)
        await asyncio.sleep(_PERIOD_SECONDS)


async def _fetch(socket: pathlib.Path, after: int) -> Refusals:
    content = await admin_client.fetch(socket, f"/refusals?after={after}")
    return msgspec.json.decode(content, type=Refusals)
