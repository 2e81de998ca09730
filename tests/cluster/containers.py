"""What a test does to a pod's containers on the node, behind the kubelet's back."""

import contextlib
import os
import pathlib
import signal

from tests import polling
from tests.cluster.api import Json
from tests.cluster.kubelet import DIRECTORY
from tests.cluster.workloads import PORT, WEB, condition
from tests.runtime.containerd import Containerd

_VOLUME = "www"
# httpd serves what is in a volume, so that a test can change it.
FRAGILE: Json = {
    **WEB,
    "command": [
        *("/bin/sh", "-c"),
        f"echo ok > /{_VOLUME}/healthz; exec /bin/httpd -f -p {PORT} -h /{_VOLUME}",
    ],
    "volumeMounts": [{"name": _VOLUME, "mountPath": f"/{_VOLUME}"}],
}
"""A server whose /healthz `set_health` controls; its pod needs `FRAGILE_VOLUMES`."""
FRAGILE_VOLUMES: list[Json] = [{"name": _VOLUME, "emptyDir": {}}]


def set_health(pod: Json, *, is_healthy: bool) -> None:
    """Let the server of a FRAGILE pod respond to probes with 200 or with 404."""
    uid = pod["metadata"]["uid"]
    file = DIRECTORY / f"pods/{uid}/volumes/kubernetes.io~empty-dir/{_VOLUME}/healthz"
    if is_healthy:
        file.write_text("ok\n", encoding="utf-8")
    else:
        file.unlink()


def kill_container(runtime: Containerd, pod: Json) -> None:
    """End the process of a pod's first container."""
    (status, *_) = pod["status"]["containerStatuses"]
    _kill(runtime, status["containerID"].rpartition("/")[2])


def kill_containers(runtime: Containerd, pod: Json) -> None:
    """End the processes of all containers of a pod that still run."""
    for status in pod["status"].get("containerStatuses", []):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _kill(runtime, status.get("containerID", "").rpartition("/")[2])


def pid_of(runtime: Containerd, pod: Json) -> int:
    """The first process of a pod's first container."""
    (status, *_) = pod["status"]["containerStatuses"]
    return _pid(runtime, status["containerID"].rpartition("/")[2])


def kill_sandbox(runtime: Containerd, pod: Json) -> None:
    """End the process that holds a pod's namespaces, as a reboot does."""
    _kill(runtime, sandbox(runtime, pod))


def sandbox(runtime: Containerd, pod: Json) -> str:
    """The id of the sandbox that podgate's condition is about."""
    message = condition(pod, "podgate.io/isolation-ready")["message"]
    short = message.rpartition("(sandbox ")[2].partition(",")[0]
    found = {path.name for path in _state(runtime).glob(f"{short}*")}
    (name,) = found
    return name


def _kill(runtime: Containerd, container: str) -> None:
    pid = _pid(runtime, container)
    os.kill(pid, signal.SIGKILL)
    polling.wait_until("the process has ended", lambda: not pathlib.Path(f"/proc/{pid}").exists())


def _pid(runtime: Containerd, container: str) -> int:
    return int((_state(runtime) / container / "init.pid").read_text())


def _state(runtime: Containerd) -> pathlib.Path:
    """Of all containers; runc keeps the id of each process there."""
    (found,) = (runtime.directory / "state").glob("io.containerd.runtime.v2.task/k8s.io")
    return found
