"""Runs tests in the DaemonSet's container: `python -m tests.image.inside FILE...`.

The pod is the DaemonSet's, in the tests' own container runtime, with this tree and the tests'
packages mounted, other limits, bcc, and the programs that tests call. So it is the image's Python
and its libraries that are tested, with the rights, the read-only root and the mounts that an agent
has in a cluster.
"""

import asyncio
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time

from agent.lab import lab as labs
from tests.agent.kube.apiserver import Json
from tests.conftest import fresh_lab
from tests.image import node as nodes
from tests.image.node import IMAGE, AgentPod, Node
from tests.polling import PATIENCE
from tests.runtime import containerd
from tests.runtime.driving import Driver

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ("awk", "cat", "ip", "nsenter", "openssl", "rm", "sh", "sleep", "tc", "true", "unshare")
PACKAGES = pathlib.Path(sysconfig.get_path("purelib"))
STATUS = "/tmp/status"
_OPENSSL = (("openssl", "/usr/lib/ssl"), ("configuration", "/etc/ssl"))
_POLL_SECONDS = 0.5
# Nothing of theirs may be written into the tree, which is mounted read-only.
_PYTEST = "python3 -m pytest -q -p no:cacheprovider -m kernel"


def _testing(pod: Json, files: list[str]) -> Json:
    """The pod with pytest in its agent's place."""
    (container,) = pod["spec"]["containers"]
    run = f'cd {ROOT} && {_PYTEST} "$@"; echo $? > {STATUS}'
    container["command"] = ["/usr/bin/sh", "-c", run, "sh"]
    container["args"] = files
    # Tests' agents have no cluster.
    container["env"] = [
        {"name": "PYTHONPATH", "value": f"{ROOT}:{PACKAGES}"},
        {"name": "HYPOTHESIS_STORAGE_DIRECTORY", "value": "/tmp/hypothesis"},
    ]
    # pytest, a stand-in kubelet, servers and agents in one cgroup.
    container["resources"]["limits"]["memory"] = "4096Mi"
    for name, path in (("tree", ROOT), ("packages", PACKAGES), *_OPENSSL):
        pod["spec"]["volumes"].append({"name": name, "hostPath": {"path": str(path), "type": ""}})
        container["volumeMounts"].append({"name": name, "mountPath": str(path), "readOnly": True})
    for mount in container["volumeMounts"]:
        if mount["name"] == "cgroups":
            # Tests make cgroups, which an agent does not.
            mount["readOnly"] = False
    return pod


async def _run(runtime: containerd.Containerd, folder: pathlib.Path, files: list[str]) -> int:
    async with (
        nodes.api_server(folder) as server,
        Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as driver,
    ):
        node = Node(runtime, driver, server, folder)
        try:
            pod = await node.start(_testing(node.pod("tests"), files))
            status = node.volume("uid-tests", "tmp") / pathlib.Path(STATUS).name
            return await asyncio.to_thread(_follow, pod, status)
        finally:
            await node.clean_up()


def _follow(pod: AgentPod, status: pathlib.Path) -> int:
    """Copy its output, until it has written its exit status."""
    printed = 0
    while True:
        is_running = pathlib.Path(f"/proc/{pod.pid}").exists()
        ended = status.read_text() if status.exists() else ""
        lines = pod.lines().split("\n")[:-1]
        for line in lines[printed:]:
            # Before it the runtime's stamp: time, stream, and whether the line is whole.
            sys.stdout.write(f"{line.split(' ', 3)[3]}\n")
        sys.stdout.flush()
        printed = len(lines)
        if ended.endswith("\n"):
            return int(ended)
        assert is_running, "the container ended"
        time.sleep(_POLL_SECONDS)


def main() -> None:
    labs.isolate()
    with (
        tempfile.TemporaryDirectory(prefix="podgate-inside-") as name,
        fresh_lab(),
        containerd.running(containerd.ptp()) as runtime,
    ):
        archive = pathlib.Path(name, "podgate.tar")
        build = [sys.executable, str(ROOT / "deploy" / "rootfs.py"), "--name", IMAGE, str(archive)]
        build += ["--compiler", *(f"--program={program}" for program in PROGRAMS)]
        subprocess.run(build, check=True, timeout=300 * PATIENCE)
        runtime.import_archive(archive)
        with nodes.as_on_a_node(runtime):
            status = asyncio.run(_run(runtime, pathlib.Path(name), sys.argv[1:]))
    sys.exit(status)


if __name__ == "__main__":
    main()
