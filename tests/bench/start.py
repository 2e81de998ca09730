"""How fast the node is closed, and what the steady agent costs: bench `start`."""

import asyncio
import datetime
import ipaddress
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import pyroute2

from agent.admin.report import AgentReport
from agent.lab import agent_process
from agent.lab import lab as labs
from agent.lab.lab import BPFFS, Lab
from agent.logs import Event
from bpf import artefacts, gates, loader, pins
from bpf.gates import Attachment, GateConfig
from bpf.pinning import Origin
from bpf.verdicts import Mode
from tests.bench import figures, newborn, sources

_RUNS = 5
_INTERFACES = 100
_ADDRESSES = (ipaddress.ip_address("198.18.1.1"), ipaddress.ip_address("fd00:18:0:1::1"))
_HTTP = {
    "readinessProbe": {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1},
}
# Long enough for every probe to have run several times and for the start's garbage to be gone.
_STEADY_SECONDS = 5


def main() -> None:
    labs.isolate()
    with tempfile.TemporaryDirectory() as nothing, tempfile.TemporaryDirectory() as prebuilt:
        os.environ[artefacts.DIRECTORY_VARIABLE] = nothing
        _note("compile and load, load what is prebuilt, first gate")
        compiled = [_load_ms(Origin.COMPILED) for _ in range(_RUNS)]
        compiled_gate = [_first_gate_ms("compiled") for _ in range(_RUNS)]
        compiler = [sys.executable, "-m", "bpf.compiler", "--all", prebuilt]
        subprocess.run(compiler, check=True)
        os.environ[artefacts.DIRECTORY_VARIABLE] = prebuilt
        figures.emit("start", "compile_load_ms", compiled, "ms")
        loads = [_load_ms(Origin.PREBUILT) for _ in range(_RUNS)]
        figures.emit("start", "prebuilt_load_ms", loads, "ms", baseline=compiled)
        first = [_first_gate_ms("prebuilt") for _ in range(_RUNS)]
        figures.emit("start", "start_to_first_gate_ms", first, "ms", baseline=compiled_gate)
        _all_else()


def _all_else() -> None:
    _attach()
    _note("programs of new interfaces")
    newborn.measure()
    _agent()
    _note("agent with a full aggregate of drop sources")
    sources.measure()


def _first_gate_ms(programs: str) -> float:
    """From exec to the first gate, python's own start included; nothing is pinned before."""
    with Lab() as network, tempfile.TemporaryDirectory() as directory:
        agent = agent_process.AgentProcess(pathlib.Path(directory))
        pod = network.add_pod("web", 1)
        agent.write_manifest(pod, mode="enforce", container={})
        try:
            started = datetime.datetime.now(datetime.UTC)
            agent.start()
            agent.wait_for("isolated pods", lambda report: report.is_synced and bool(report.pods))
            (loaded,) = agent.log_lines(Event.PROGRAMS_LOADED)
            assert loaded["programs"] == programs
            gated = agent.log_lines(Event.INTERFACE_GATED)[0]
            return (agent_process.log_time(gated) - started).total_seconds() * 1000
        finally:
            agent.stop(signal.SIGKILL)
            agent.cleanup()


def _load_ms(origin: Origin) -> float:
    installation = pins.Pins(BPFFS)
    started = time.perf_counter()
    loaded = asyncio.run(loader.load(installation))
    elapsed_ms = (time.perf_counter() - started) * 1000
    assert loaded.outcome.origin is origin
    loaded.close()
    installation.remove_everything()
    return elapsed_ms


def _attach() -> None:
    _note(f"attach to {_INTERFACES} interfaces, tcx and clsact in turn")
    installation = pins.Pins(BPFFS)
    loaded = asyncio.run(loader.load(installation))
    milliseconds: dict[Attachment, list[float]] = {kind: [] for kind in Attachment}
    for _ in range(_RUNS):
        for kind in Attachment:
            ifindexes = _make_veths()
            opened = gates.Gates(loaded, installation, kind)
            config = GateConfig(Mode.ENFORCE, _ADDRESSES)
            started = time.perf_counter()
            for ifindex in ifindexes:
                opened.install(ifindex, config)
            milliseconds[kind].append((time.perf_counter() - started) * 1000)
            assert len(opened.installed()) == _INTERFACES
            for ifindex in ifindexes:
                opened.remove(ifindex)
            opened.close()
            _remove_veths(ifindexes)
    loaded.close()
    installation.remove_everything()
    tcx, clsact = milliseconds[Attachment.TCX], milliseconds[Attachment.CLSACT]
    figures.emit("start", f"attach_{_INTERFACES}_tcx_ms", tcx, "ms")
    figures.emit("start", f"attach_{_INTERFACES}_clsact_ms", clsact, "ms", baseline=tcx)


def _agent() -> None:
    _note("agent with four pods: restart, memory")
    with Lab() as network:
        servers = []
        agent = agent_process.AgentProcess()
        for number, name in enumerate(("web", "rpc", "shop", "cart"), start=1):
            pod = network.add_pod(name, number, bridged=number > 2)
            command = [sys.executable, "-m", "agent.operate.demo.servers", "http", "8080"]
            servers.append(labs.popen_in(pod.netns, command))
            agent.write_manifest(pod, mode="enforce", container=_HTTP)
        try:
            cold = [_start_ms(agent)]
            agent.stop(signal.SIGTERM)
            warm = []
            for _ in range(_RUNS):
                warm.append(_start_ms(agent))
                agent.stop(signal.SIGKILL)
            figures.emit("start", "restart_ms", warm, "ms", baseline=cold)
            agent.start()
            agent.wait_for("passing probes", _all_passing)
            time.sleep(_STEADY_SECONDS)
            figures.emit("start", "pss_mb", [_pss_mb(agent.pid)], "MB")
            figures.emit("start", "libbcc_mapped", [_maps_libbcc(agent.pid)], "bool")
        finally:
            agent.stop(signal.SIGKILL)
            for server in servers:
                server.kill()
                server.wait()


def _start_ms(agent: agent_process.AgentProcess) -> float:
    """From exec to every pod isolated, python's own start included."""
    started = time.perf_counter()
    agent.start()
    agent.wait_for("all pods isolated", lambda report: report.is_synced and bool(report.pods))
    return (time.perf_counter() - started) * 1000


def _all_passing(report: AgentReport) -> bool:
    return all(
        condition.status == "True" for pod in report.pods for condition in pod.conditions
    ) and bool(report.pods)


def _pss_mb(pid: int) -> float:
    rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def _maps_libbcc(pid: int) -> int:
    return int("libbcc" in pathlib.Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"))


def _make_veths() -> list[int]:
    with pyroute2.IPRoute() as netlink:
        for number in range(_INTERFACES):
            netlink.link(
                "add", ifname=f"b{number}", kind="veth", peer={"ifname": f"p{number}"}, state="up"
            )
        return [netlink.link_lookup(ifname=f"b{number}")[0] for number in range(_INTERFACES)]


def _remove_veths(ifindexes: list[int]) -> None:
    with pyroute2.IPRoute() as netlink:
        for ifindex in ifindexes:
            netlink.link("del", index=ifindex)


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
