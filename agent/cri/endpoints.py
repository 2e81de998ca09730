"""Finds the container runtime's socket on a node."""

import pathlib
from collections.abc import Iterable

from agent.cri.client import CriError, RuntimeClient

# In a container their directories must be mounted, not the sockets: a runtime's restart makes new
# ones.
SOCKETS = (
    pathlib.Path("/run/containerd/containerd.sock"),
    pathlib.Path("/run/crio/crio.sock"),
    pathlib.Path("/run/k3s/containerd/containerd.sock"),  # and RKE2
    pathlib.Path("/run/k0s/containerd.sock"),
    pathlib.Path("/var/snap/microk8s/common/run/containerd.sock"),
    pathlib.Path("/run/cri-dockerd.sock"),
)


async def open_runtime(
    named: pathlib.Path | None = None, candidates: Iterable[pathlib.Path] = SOCKETS
) -> RuntimeClient:
    """The runtime at the named socket, else the one of the candidates that has pods.

    A node may have several: Docker includes a containerd. If none has pods yet, the runtime must be
    the only one that responds. Raises `CriError`.
    """
    paths = [named] if named else [path for path in candidates if path.exists()]
    if not paths:
        raise CriError(
            "no container runtime's socket found; name the one that the kubelet uses, and mount "
            "its directory."
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
    responding: list[RuntimeClient] = []
    problems: list[str] = []
    for path in paths:
        runtime = RuntimeClient(path)
        opened.append(runtime)
        try:
            await runtime.version()
        except CriError as error:
            problems.append(str(error))
        else:
            responding.append(runtime)
    if not responding:
        raise CriError(" ".join(problems))
    if len(responding) > 1:
        busy = [runtime for runtime in responding if await runtime.list_sandboxes()]
        if len(busy) != 1:
            sockets = " and ".join(str(runtime.socket) for runtime in responding)
            raise CriError(
                f"{sockets} are all container runtimes, and {len(busy)} of them have pods; name "
                "the one that the kubelet uses."
            )
        responding = busy
    return responding[0]
