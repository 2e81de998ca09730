"""What 250 pods of a cluster cost, and how soon a change reaches the API server: bench `kube`.

Pods are namespaces of the lab, and the runtime is a CRI server that lists them: 250 real
sandboxes would be 500 more processes, and nothing that the agent does depends on them. API server
and CRI answer over real sockets, from the process that measures.
"""

import asyncio
import contextlib
import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from aiohttp import web

from agent import labels
from agent.admin.report import AgentReport
from agent.default_deny import table as default_deny_table
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import BPFFS, Lab, LabPod
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import NAMESPACES, NODES, ApiServer
from tests.agent.kube.conftest import write_kubeconfig
from tests.bench import answering, figures
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup
from tests.runtime.labpods import serving_pods

_PODS = 250
# Each with a server of its own, so that it can fail alone.
_SINGLE = 20
_CHANGED = 5
_REST_SECONDS = 15.0
_PATIENCE_SECONDS = 60.0
_NODE = "node1"
_PROBE = {
    # All else as the kubelet has it; failures count at once, so that one is a change.
    "readinessProbe": {
        "httpGet": {"path": "/healthz", "port": answering.PORT},
        "failureThreshold": 1,
    }
}


def main() -> None:
    labs.isolate()
    with tempfile.TemporaryDirectory() as directory, Lab() as network:
        _note(f"making {_PODS} pods")
        pods = [network.add_pod(f"pod-{number}", number + 1) for number in range(_PODS)]
        # On a node without a kubelet the agent looks for it all the time.
        with cgroups.cgroup() as kubelet:
            kubelet.popen(["sleep", "1000"])
            asyncio.run(_run(pathlib.Path(directory), pods, kubelet))


async def _run(directory: pathlib.Path, pods: list[LabPod], kubelet: Cgroup) -> None:
    api, arrived = ApiServer(), Arrivals()
    api.faults.append(arrived.note)
    api.put({"kind": "Node", "metadata": {"name": _NODE}}, path=NODES)
    api.put({"kind": "Namespace", "metadata": {"name": "default"}}, path=NAMESPACES)
    for pod in pods:
        thing = apiserver.gated(pod.name)
        thing["spec"]["containers"][0].update(_PROBE)
        api.put(thing)
    socket = directory / "cri.sock"
    operator = AgentProcess(directory, BPFFS)
    async with serving_pods(socket, pods), contextlib.AsyncExitStack() as serving:
        await serving.enter_async_context(api.running())
        kubeconfig = write_kubeconfig(directory / "kube", f"http://127.0.0.1:{api.port}")
        operator.pods_from = (
            *("--node-name", _NODE, "--kubeconfig", kubeconfig),
            *("--cri-socket", str(socket)),
        )
        apps = Apps(pods)
        try:
            begun = time.monotonic()
            operator.start("--mode", "enforce", "--kubelet", f"cgroup:{kubelet.path}")
            await _until(lambda: all(is_ready(api, pod) for pod in pods))
            _note(f"all ready in the API after {time.monotonic() - begun:.1f} s")
            await _rest(operator, api)
            await _single_flips(operator, arrived, apps)
            await _all_flip(operator, arrived, apps)
            await serving.aclose()
            await _outage(operator, api, serving, apps)
        finally:
            operator.stop(signal.SIGKILL)
            apps.end()
            await default_deny_table.remove()


class Arrivals:
    """When each pod's patches came to the API server, in Unix time."""

    def __init__(self) -> None:
        self.by_pod: dict[str, list[float]] = {}

    async def note(self, request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH" and request.path.endswith("/status"):
            self.by_pod.setdefault(request.path.split("/")[-2], []).append(time.time())
        return None

    def last(self, pod: str) -> float:
        return self.by_pod[pod][-1]

    def count(self) -> int:
        return sum(map(len, self.by_pod.values()))


class Apps:
    """Servers in the pods: one process for most of them, and one for each that fails alone."""

    def __init__(self, pods: list[LabPod]) -> None:
        self.single, self._others = pods[:_SINGLE], pods[_SINGLE:]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.start()

    def start(self) -> None:
        """All that do not run."""
        for pod in self.single:
            self._start(pod.name, [pod])
        self._start("", self._others)

    def end(self, *names_of_single: str) -> None:
        """These, or all of them."""
        for name in names_of_single or tuple(self._running):
            process = self._running.pop(name)
            process.kill()
            process.communicate()

    def _start(self, name: str, pods: list[LabPod]) -> None:
        if name not in self._running:
            paths = [pod.netns.path for pod in pods]
            self._running[name] = process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.answering", "http", "", "", *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"


async def _rest(operator: AgentProcess, api: ApiServer) -> None:
    _note(f"at rest for {_REST_SECONDS:.0f} s")
    patches, cpu, begun = len(api.patches()), _cpu_seconds(operator.pid), time.monotonic()
    await asyncio.sleep(_REST_SECONDS)
    seconds = time.monotonic() - begun
    percent = (_cpu_seconds(operator.pid) - cpu) / seconds * 100
    figures.emit("kube", "pss_mb_250_pods", [_pss_mb(operator.pid)], "MB")
    figures.emit("kube", "cpu_percent_at_rest", [percent], "% of one CPU")
    per_minute = (len(api.patches()) - patches) / seconds * 60
    figures.emit("kube", "patches_per_min_at_rest", [per_minute], "1/min")


async def _single_flips(operator: AgentProcess, arrived: Arrivals, apps: Apps) -> None:
    _note(f"{_SINGLE} pods fail one after the other")
    milliseconds = []
    for pod in apps.single:
        seen = arrived.count()
        apps.end(pod.name)
        await _until(lambda seen=seen: arrived.count() > seen)
        milliseconds.append((arrived.last(pod.name) - _changed(operator)[pod.name]) * 1000)
    figures.emit("kube", "result_to_patch_p99_ms", [_p99(milliseconds)], "ms")
    apps.start()
    await _wait(operator, "all pods ready again", _all_ready)


async def _all_flip(operator: AgentProcess, arrived: Arrivals, apps: Apps) -> None:
    _note(f"{_PODS} pods fail at once")
    # What flipped before may be patched no more than every ten seconds; its turn comes.
    await asyncio.sleep(10)
    seen = {name: len(times) for name, times in arrived.by_pod.items()}
    apps.end()
    await _until(lambda: all(len(arrived.by_pod[name]) > count for name, count in seen.items()))
    changed = _changed(operator)
    milliseconds = [(arrived.last(name) - changed[name]) * 1000 for name in seen]
    figures.emit("kube", "result_to_patch_250_p99_ms", [_p99(milliseconds)], "ms")
    apps.start()
    await _wait(operator, "all pods ready again", _all_ready)
    await _wait(operator, "all said", lambda report: not report.pod_source.pending_conditions)


async def _outage(
    operator: AgentProcess, api: ApiServer, serving: contextlib.AsyncExitStack, apps: Apps
) -> None:
    _note("API server away")
    names_of_changed = [pod.name for pod in apps.single[:_CHANGED]]
    before = len(api.patches())
    for _ in range(2):
        apps.end(*names_of_changed)
        await _wait(
            operator, "failures", lambda report: report.pod_source.pending_conditions == _CHANGED
        )
        apps.start()
        await _wait(operator, "ready again", _all_ready)
    apps.end(*names_of_changed)
    await _wait(
        operator, "failures", lambda report: report.pod_source.pending_conditions == _CHANGED
    )
    await serving.enter_async_context(api.running(port=api.port))
    await _wait(operator, "all said", lambda report: not report.pod_source.pending_conditions)
    each = (len(api.patches()) - before) / _CHANGED
    figures.emit("kube", "patches_per_changed_pod", [each], "patches")


def is_ready(api: ApiServer, pod: LabPod) -> bool:
    """Whether the API has both conditions as True."""
    found = api.get(pod.name)["status"].get("conditions", ())
    return [one["status"] for one in found] == ["True", "True"]


def _all_ready(report: AgentReport) -> bool:
    statuses = [condition.status for pod in report.pods for condition in pod.conditions]
    return statuses.count("True") == 2 * _PODS


def _changed(operator: AgentProcess) -> dict[str, float]:
    """The last change of each pod's probes in the log, in Unix time."""
    return {
        line["pod"].partition("/")[2]: datetime.datetime.fromisoformat(line["time"]).timestamp()
        for line in operator.log_lines()
        if line.get("type") == labels.PROBES_PASSING and line["was"] != line["status"]
    }


async def _wait(operator: AgentProcess, what: str, holds: Any) -> None:
    await asyncio.to_thread(operator.wait_for, what, holds)


async def _until(holds: Any) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110 - states without an event
            await asyncio.sleep(0.001)


def _p99(samples: list[float]) -> float:
    return sorted(samples)[max(0, -(-len(samples) * 99 // 100) - 1)]


def _cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_mb(pid: int) -> float:
    rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
