"""Check of the container runtime: whether one responds, and which."""

import pathlib
from collections.abc import Iterable

from agent.cri import endpoints
from agent.cri.client import CriError
from agent.operate.doctor.finding import Finding, ok, problem, warning

_NAME_IT = "Mount the directory of the runtime's socket, or name the socket with --cri-socket."


async def check(
    named: pathlib.Path | None = None, candidates: Iterable[pathlib.Path] = endpoints.SOCKETS
) -> Finding:
    """As the agent chooses it."""
    try:
        runtime = await endpoints.open_runtime(named, candidates)
    except CriError as error:
        return problem("runtime", str(error), _NAME_IT)
    try:
        version = await runtime.version()
        unready = await runtime.unready_reason()
    except CriError as error:
        return problem("runtime", str(error), _NAME_IT)
    finally:
        await runtime.aclose()
    if unready:
        text = f"{version} at {runtime.socket} is not ready: {unready}."
        return warning("runtime", text, "Solve that: new pods do not start.")
    return ok("runtime", f"{version} at {runtime.socket} responds.")
