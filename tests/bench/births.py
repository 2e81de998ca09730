"""The agent's CPU time for a pod that starts, among few and many others: bench `births`.

Pods start at once as in the bench `burst`, which has the time until they are ready. Here it is the
agent's own work, from the first pod's creation until podgate's conditions of all are True: figures
`MODE_SIZE_KIND_agent_cpu_ms_per_birth`, with a readiness probe every ten seconds, the API's
default, or without probes. `MODE_KIND_growth` is that of the most pods over that of the fewest: 1
if nothing is computed for all pods at one pod's change. In strict it has the relay's time, too.
"""

import asyncio
import contextlib
import os
import pathlib
import sys
import tempfile

from agent import labels
from agent.lab import lab as labs
from tests.agent.kube.apiserver import Json
from tests.bench import burst, figures
from tests.conftest import fresh_lab
from tests.node.node import READY, Node
from tests.runtime import containerd
from tests.runtime.driving import Driver

_SIZES = [int(size) for size in (os.environ.get("PODGATE_BENCH_SIZES") or "50,100,250").split(",")]
_MODES = ("audit", "enforce", "strict")
_RUNS = 2
_SETTLE_SECONDS = 4.0
_PROBED: Json = {"readinessProbe": {**READY["readinessProbe"], "periodSeconds": 10}}
_KINDS: dict[str, Json] = {"probed": _PROBED, "bare": {}}


def main() -> None:
    labs.isolate()
    with (
        tempfile.TemporaryDirectory() as directory,
        fresh_lab(),
        containerd.running(containerd.ptp()) as runtime,
    ):
        asyncio.run(_run(pathlib.Path(directory), runtime))


async def _run(directory: pathlib.Path, runtime: containerd.Containerd) -> None:
    cases = [(mode, kind, size) for mode in _MODES for kind in _KINDS for size in _SIZES]
    found: dict[tuple[str, str, int], list[float]] = {case: [] for case in cases}
    async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as driver:
        for number in range(_RUNS):
            for case in cases:
                mode, kind, size = case
                sys.stderr.write(f"bench births: {size} pods, {mode}, {kind}\n")
                name = f"{number}-{mode}-{kind}-{size}"
                async with burst.node_with_agent(driver, directory, runtime, name, mode) as node:
                    names = [f"{name}-{pod}" for pod in range(size)]
                    found[case].append(await _cpu_ms(node, names, _KINDS[kind]) / size)
    for (mode, kind, size), samples in found.items():
        figures.emit("births", f"{mode}_{size}_{kind}_agent_cpu_ms_per_birth", samples, "ms")
    for mode in _MODES:
        for kind in _KINDS:
            few, many = found[mode, kind, min(_SIZES)], found[mode, kind, max(_SIZES)]
            growth = [one / other for one, other in zip(many, few, strict=True)]
            figures.emit("births", f"{mode}_{kind}_growth", growth, "ratio")


async def _cpu_ms(node: Node, names: list[str], container: Json) -> float:
    # What the agent's own start leaves to do.
    await asyncio.sleep(_SETTLE_SECONDS)
    before = _cpu_seconds(node.operator.pid)
    async with burst.pods_at_once(node, names, container):
        async with asyncio.timeout(burst.PATIENCE_SECONDS):
            while not all(_is_done(node, name, container) for name in names):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        after = _cpu_seconds(node.operator.pid)
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items()) * 1000


def _is_done(node: Node, name: str, container: Json) -> bool:
    if container:
        return node.is_ready(name)
    return bool(node.condition(name, labels.ISOLATION_READY).get("status") == "True")


def _cpu_seconds(agent: int) -> dict[int, float]:
    """Of the agent and its relay, by pid; commands that it runs may end at any time."""
    children = pathlib.Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    found = {}
    for pid in (agent, *map(int, children)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = burst.cpu_seconds_of(pid)
    return found


if __name__ == "__main__":
    main()
