"""The admin API's client: one request over the unix socket."""

import pathlib

import aiohttp

from agent.errors import PodgateError

_TIMEOUT_SECONDS = 10


class Unreachable(PodgateError):
    """No agent answers on this socket, or it cannot do what it was told; the message says what to
    do."""


async def fetch(path: pathlib.Path, resource: str) -> bytes:
    """GET a resource of the agent whose admin socket is at `path`. Raises `Unreachable`."""
    return await _ask(path, "GET", resource, _TIMEOUT_SECONDS)


async def post(path: pathlib.Path, resource: str, *, timeout_seconds: float) -> bytes:
    """Have the agent do something. Raises `Unreachable`, with its sentence if it could not."""
    return await _ask(path, "POST", resource, timeout_seconds)


async def _ask(path: pathlib.Path, method: str, resource: str, timeout_seconds: float) -> bytes:
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    connector = aiohttp.UnixConnector(path=str(path))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, f"http://podgate{resource}") as response,
        ):
            if response.status == 409:
                raise Unreachable((await response.text()).strip())
            if response.status != 200:
                raise Unreachable(
                    f"the agent at {path} answered with status {response.status}; see its log."
                )
            return await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unreachable(
            f"no agent answers at {path} ({_reason(error, timeout_seconds)}); is 'podgate run' "
            "running, and are you root?"
        ) from error


def _reason(error: Exception, timeout_seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_seconds} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error)
