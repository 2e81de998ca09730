"""Which of a node's sockets is the container runtime's."""

import pathlib
from collections.abc import Iterable

from agent.cri.client import CriError, RuntimeClient

# In a container they are there if their directories are mounted: sockets are made anew by a
# runtime's restart.
SOCKETS = (
    pathlib.Path("/run/containerd/containerd.sock"),
    pathlib.Path("/run/crio/crio.sock"),
    pathlib.Path("/run/k3s/containerd/containerd.sock"),  # RKE2, too
    pathlib.Path("/run/k0s/containerd.sock"),
    pathlib.Path("/var/snap/microk8s/common/run/containerd.sock"),
    pathlib.Path("/run/cri-dockerd.sock"),
)


async def open_runtime(
    named: pathlib.Path | None = None, candidates: Iterable[pathlib.Path] = SOCKETS
) -> RuntimeClient:
    """The runtime at the socket that was named, else the one of the candidates that has pods.

    A node may have several that answer: Docker brings a containerd of its own. Where none of them
    has pods yet, the first one is taken only if it is the only one. Raises `CriError`.
    """
    paths = [named] if named else [path for path in candidates if path.exists()]
    if not paths:
        raise CriError(
            "no container runtime's socket was found; name the one that the kubelet uses, and "
            "mount its directory."
        )
    opened: list[RuntimeClient] = []
    chosen: RuntimeClient | None = None
    try:
        chosen = await _choose(paths, opened)
    finally:
        for runtime in opened:
            if runtime is not chosen:
                await runtime.aclose()
    return chosen


async def _choose(paths: Iterable[pathlib.Path], opened: list[RuntimeClient]) -> RuntimeClient:
    answering: list[RuntimeClient] = []
    problems: list[str] = []
    for path in paths:
        runtime = RuntimeClient(path)
        opened.append(runtime)
        try:
            await runtime.version()
        except CriError as error:
            problems.append(str(error))
        else:
            answering.append(runtime)
    if not answering:
        raise CriError(" ".join(problems))
    if len(answering) > 1:
        busy = [runtime for runtime in answering if await runtime.list_sandboxes()]
        if len(busy) != 1:
            sockets = " and ".join(str(runtime.socket) for runtime in answering)
            raise CriError(
                f"{sockets} all answer as container runtimes, and {len(busy)} of them have pods; "
                "name the one that the kubelet uses."
            )
        answering = busy
    return answering[0]
