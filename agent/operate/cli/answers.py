"""Answers of the agent to commands: typed, from an agent of any version, or without an agent."""

import asyncio
import pathlib
from collections.abc import Callable
from typing import TypeVar

import click
import msgspec

from agent import VERSION
from agent.admin import client, decoding
from agent.errors import AgentRequestError, AgentUnreachableError, PodgateError
from agent.settings import admin_socket
from bpf.errors import KernelSideError

T = TypeVar("T")


def read(
    run_directory: pathlib.Path,
    resource: str,
    kind: type[T],
    *,
    without_agent: Callable[[], T] | None = None,
) -> T:
    """The agent's answer to a GET of `resource`.

    without_agent: reads the same from the kernel's pinned objects; used, with one sentence on
    stderr, where no agent responds. Raises `AgentUnreachableError` if there is no answer at all,
    and `AgentRequestError` if the agent's is none.
    """
    return asyncio.run(read_async(run_directory, resource, kind, without_agent=without_agent))


async def read_async(
    run_directory: pathlib.Path,
    resource: str,
    kind: type[T],
    *,
    without_agent: Callable[[], T] | None = None,
) -> T:
    """As `read`, for programs with an event loop."""
    socket = admin_socket(run_directory)
    try:
        content, version = await client.fetch_with_version(socket, resource)
    except AgentUnreachableError as error:
        if without_agent is None:
            raise
        return read_pins(error, without_agent)
    if version != VERSION:
        click.echo(
            f"podgate: the agent has version {version or 'unknown'}, this command {VERSION}; what "
            "one of them does not know is left out.",
            err=True,
        )
    try:
        return decoding.decode(content, kind)
    except msgspec.DecodeError as error:
        raise AgentRequestError(
            f"the agent's answer to {resource} cannot be read ({error}); use its own podgate "
            "command."
        ) from error


def read_pins(unreachable: AgentUnreachableError, without_agent: Callable[[], T]) -> T:
    """What the pinned objects have, after a sentence on stderr. Raises `AgentUnreachableError` with
    both reasons if they have no answer."""
    try:
        found = without_agent()
    except (PodgateError, KernelSideError, OSError) as error:
        raise AgentUnreachableError(
            f"{unreachable} The pinned BPF objects have no answer either: {error}"
        ) from error
    click.echo(f"podgate: {unreachable} What follows is from the pinned BPF objects.", err=True)
    return found
