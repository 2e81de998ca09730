"""Check of the container runtime: whether one responds, and which."""

import pathlib
from collections.abc import Iterable

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.cri import endpoints
from agent.cri.client import CriError
from agent.operate.doctor.results import Passed, Result


async def check(
    named: pathlib.Path | None = None, candidates: Iterable[pathlib.Path] = endpoints.SOCKETS
) -> Result:
    """As the agent chooses it."""
    try:
        runtime = await endpoints.open_runtime(named, candidates)
    except CriError as error:
        return found(kinds.RUNTIME_NOT_FOUND, str(error))
    try:
        version = await runtime.version()
        unready = await runtime.unready_reason()
    except CriError as error:
        return found(kinds.RUNTIME_NOT_FOUND, str(error))
    finally:
        await runtime.aclose()
    if unready:
        text = f"{version} at {runtime.socket} is not ready: {unready}"
        return found(kinds.RUNTIME_NOT_READY, text)
    return Passed("runtime", f"{version} at {runtime.socket} responds.")
