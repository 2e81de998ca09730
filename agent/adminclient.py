"""The admin API's client: one request over the unix socket."""

import pathlib

import aiohttp

_TIMEOUT_SECONDS = 10


class Unreachable(Exception):
    """No agent answers on this socket; the message says what to do."""


async def fetch(path: pathlib.Path, resource: str) -> bytes:
    """GET a resource of the agent whose admin socket is at `path`. Raises `Unreachable`."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    connector = aiohttp.UnixConnector(path=str(path))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get(f"http://podgate{resource}") as response,
        ):
            if response.status != 200:
                raise Unreachable(
                    f"the agent at {path} answered with status {response.status}; see its log."
                )
            return await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = "no answer within 10 s" if isinstance(error, TimeoutError) else error
        raise Unreachable(
            f"no agent answers at {path} ({reason}); is 'podgate run' running, and are you root?"
        ) from error
