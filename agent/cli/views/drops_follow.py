"""`podgate drops --follow`: polls the agent for new drop events."""

import asyncio
import pathlib
from collections.abc import Callable

from agent.admin import client as admin_client
from agent.admin import decoding
from agent.admin.report import DropEvents, DropEventStatus
from agent.cli import output
from agent.cli.commands.options import Format
from agent.cli.views import drops

_PERIOD_SECONDS = 0.5


async def follow(
    socket: pathlib.Path, form: Format, is_chosen: Callable[[DropEventStatus], bool]
) -> None:
    """Print chosen drop events from now on, until interrupted.

    Raises `AgentUnreachableError` when the agent stops.
    """
    newest = (await _fetch(socket, 0)).newest
    while True:
        events = await _fetch(socket, newest)
        if events.newest < newest:
            newest = 0  # another agent, which counts from 0
            continue
        newest = events.newest
        for event in filter(is_chosen, events.events):
            _write(event, form)
        await asyncio.sleep(_PERIOD_SECONDS)


def _write(event: DropEventStatus, form: Format) -> None:
    output.write(event, form, lambda screen: drops.show_event(screen, event))


async def _fetch(socket: pathlib.Path, after: int) -> DropEvents:
    content, _ = await admin_client.fetch_with_version(socket, f"/drop-events?after={after}")
    return decoding.decode(content, DropEvents)
