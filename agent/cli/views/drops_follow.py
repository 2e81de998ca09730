"""`podgate drops --follow`: polls the agent for new drop events."""

import asyncio
import pathlib

from agent.admin import client as admin_client
from agent.admin import decoding
from agent.admin.report import DropEvents
from agent.cli import output
from agent.cli.commands.options import Format
from agent.cli.views import status as status_view

_PERIOD_SECONDS = 0.5


async def follow(socket: pathlib.Path, form: Format) -> None:
    """Print drop events from now on, until interrupted.

    Raises `AgentUnreachableError` when the agent stops.
    """
    newest = (await _fetch(socket, 0)).newest
    while True:
        events = await _fetch(socket, newest)
        if events.newest < newest:
            newest = 0  # another agent, which counts from 0
            continue
        newest = events.newest
        if form in (Format.JSON, Format.YAML):
            for event in events.events:
                output.write(event, form, lambda _: None)
        else:
            status_view.show_drop_events(events)
        await asyncio.sleep(_PERIOD_SECONDS)


async def _fetch(socket: pathlib.Path, after: int) -> DropEvents:
    content = await admin_client.fetch(socket, f"/drop-events?after={after}")
    return decoding.decode(content, DropEvents)
