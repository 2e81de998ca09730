"""The admin API's client: one request over the unix socket."""

import pathlib

import aiohttp

from agent.errors import PodgateError

_TIMEOUT_SECONDS = 10


class AgentUnreachableError(PodgateError):
    """The agent does not respond on its admin socket, or rejects the request; the message names
    the next step."""


async def fetch(
    path: pathlib.Path, resource: str, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> bytes:
    """GET a resource from the admin socket at `path`. Raises `AgentUnreachableError`."""
    return await _request(path, "GET", resource, timeout_seconds)


async def post(path: pathlib.Path, resource: str, *, timeout_seconds: float) -> bytes:
    """POST to a resource of the agent. Raises `AgentUnreachableError`, with the agent's sentence
    if it failed."""
    return await _request(path, "POST", resource, timeout_seconds)


async def _request(path: pathlib.Path, method: str, resource: str, timeout_seconds: float) -> bytes:
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    connector = aiohttp.UnixConnector(path=str(path))
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.request(method, f"http://podgate{resource}") as response,
        ):
            if response.status == 409:
                raise AgentUnreachableError((await response.text()).strip())
            if response.status != 200:
                raise AgentUnreachableError(
                    f"the agent at {path} responded with status {response.status}; see its log."
                )
            return await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AgentUnreachableError(
            f"no agent responds at {path} ({_reason(error, timeout_seconds)}); is 'podgate run' "
            "running, and are you root?"
        ) from error


def _reason(error: Exception, timeout_seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {timeout_seconds} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    return str(error)
