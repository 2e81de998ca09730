"""`podgate drops --follow`: polls the agent for new drop events."""

import asyncio
import contextlib
import datetime
import os
import pathlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from agent.admin import client as admin_client
from agent.admin import decoding
from agent.admin.report import DropEvents, DropEventStatus, SuppressedEvents
from agent.operate.cli import output
from agent.operate.cli.commands.options import Format
from agent.operate.cli.views import drops

_PERIOD_SECONDS = 0.5


async def follow(
    socket: pathlib.Path, form: Format, is_chosen: Callable[[DropEventStatus], bool]
) -> None:
    """Print chosen drop events from now on, and how many the kernel suppressed, until interrupted.

    Raises `AgentUnreachableError` when the agent stops.
    """
    events = await _fetch(socket, 0)
    newest, lost = events.newest, events.lost
    while True:
        events = await _fetch(socket, newest)
        if events.newest < newest:
            newest = 0  # another agent, which counts from 0
            continue
        newest = events.newest
        for event in filter(is_chosen, events.events):
            _write(event, form)
        if events.lost > lost:
            _write_suppressed(events.lost - lost, form)
        lost = events.lost
        await asyncio.sleep(_PERIOD_SECONDS)


def _write(event: DropEventStatus, form: Format) -> None:
    output.write(event, form, lambda screen: drops.show_event(screen, event))


def _write_suppressed(count: int, form: Format) -> None:
    found = SuppressedEvents(at=datetime.datetime.now(datetime.UTC), suppressed=count)
    output.write(found, form, lambda screen: drops.show_suppressed(screen, found))


async def _fetch(socket: pathlib.Path, after: int) -> DropEvents:
    content, _ = await admin_client.fetch_with_version(socket, f"/drop-events?after={after}")
    return decoding.decode(content, DropEvents)


async def until_end_of_input(following: Coroutine[Any, Any, None], descriptor: int) -> None:
    """Run `following` until it ends, or until all of this descriptor's input has been read.

    A process that kubectl exec started does not end with kubectl, but its input does.
    """
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(has_ended.set)

    # Not of the loop's pool, which would be awaited at the end.
    threading.Thread(target=read, name="end of input", daemon=True).start()
    tasks = {asyncio.ensure_future(following), asyncio.ensure_future(has_ended.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
