"""The admin API's client: one request over the unix socket."""

import pathlib

from agent.errors import AgentRequestError, AgentUnreachableError
from agent.http_library import aiohttp

# An agent that is busy with its gates responds to /version: it takes the event loop only, which is
# never blocked for long, and a machine that is twenty times as slow still responds in time.
ALIVE_SECONDS = 5
# Reports wait for the counters of all gates, which wait for a pass of the reconciler.
_TIMEOUT_SECONDS = 10
_ANSWER_SECONDS = 60


async def fetch(
    path: pathlib.Path, resource: str, *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> bytes:
    """GET a resource from the admin socket at `path`.

    Raises `AgentRequestError`; if no agent responds it is an `AgentUnreachableError`.
    """
    return await _request(path, "GET", resource, timeout_seconds)


async def fetch_with_version(path: pathlib.Path, resource: str) -> tuple[bytes, str]:
    """The same, and the agent's version. An agent that hangs is unreachable after a few seconds;
    one that only works on a long pass is awaited."""
    version = await fetch_version(path)
    return await _request(path, "GET", resource, _ANSWER_SECONDS), version


async def fetch_version(path: pathlib.Path) -> str:
    """The agent's version, empty if it is older than this resource. Raises
    `AgentUnreachableError`."""
    try:
        return (await _request(path, "GET", "/version", ALIVE_SECONDS)).decode().strip()
    except AgentUnreachableError:
        raise
    except AgentRequestError:
        return ""


async def post(path: pathlib.Path, resource: str, *, timeout_seconds: float) -> bytes:
    """POST to a resource of the agent. Raises as `fetch`, with the agent's sentence if it
    failed."""
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
                raise AgentRequestError((await response.text()).strip())
            if response.status == 404:
                raise AgentRequestError(
                    f"the agent at {path} is of another version and does not serve {resource}; use "
                    "its own podgate command."
                )
            if response.status != 200:
                raise AgentRequestError(
                    f"the agent at {path} responded with status {response.status}; see its log."
                )
            return await response.read()
    except (aiohttp.ClientError, OSError) as error:
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
