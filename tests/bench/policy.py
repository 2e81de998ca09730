"""What policies cost: bench `policy`.

resolve_1000_policies_250_pods_ms: from valid policies to the rules of all pods, where nothing is
known of either; each policy selects one of 50 namespaces and one of ten labels.
follow_change_p99_ms: from a new cgroup of a named unit to a connection from it to a pod, with 1,000
policies and 100 gates, all of which get the new rule. The first is also printed for one changed
cgroup, which is what happens all the time.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, are_all_isolated
from agent.lab.lab import BPFFS, Lab, LabPod
from agent.linux.cgroups import CgroupId
from agent.pods.pod import Pod
from agent.policy import api_types
from agent.policy.matching import RuleSet
from tests import polling
from tests.bench import figures, suggest
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup

_POLICIES = 1000
_PODS = 250
_GATED = 100
_NAMESPACES = 50
_APPS = 10
_SAMPLES = 10
_CHANGES = 200
_PORT = 8080
_UNIT = "podgate-bench.service"


def main() -> None:
    _measure_resolution()
    suggest.measure()
    labs.isolate()
    with tempfile.TemporaryDirectory() as directory, Lab() as network:
        _note(f"making {_GATED} pods")
        pods = [network.add_pod(f"pod-{number}", number + 1) for number in range(_GATED)]
        with cgroups.cgroup() as kubelet:
            agent = AgentProcess(pathlib.Path(directory), BPFFS)
            agent.kubelet = ("--kubelet", f"cgroup:{kubelet.path}")
            try:
                _start(agent, pathlib.Path(directory) / "rules", pods)
                with pods[-1].listen(_PORT) as listener:
                    _measure_changes(pods[-1], listener)
            finally:
                agent.stop(signal.SIGKILL)


def _document(number: int, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": f"policy-{number}"},
        "spec": {
            "pods": {
                "namespaces": [f"ns-{number % _NAMESPACES}"],
                "podSelector": {"matchLabels": {"app": f"app-{number % _APPS}"}},
            },
            "from": [source],
            "ports": [{"port": 1 + number}],
        },
    }


def _measure_resolution() -> None:
    sources = [{"systemdUnit": {"name": f"unit-{number}.service"}} for number in range(_POLICIES)]
    documents = [_document(number, source) for number, source in enumerate(sources)]
    policies = [api_types.read(document, source="bench") for document in documents]
    cgroups_of = {f"unit-{number}.service": (CgroupId(number, 2),) for number in range(_POLICIES)}
    pods = [
        Pod(
            uid=str(number),
            namespace=f"ns-{number % _NAMESPACES}",
            name=f"pod-{number}",
            labels={"app": f"app-{number % _APPS}"},
        )
        for number in range(_PODS)
    ]
    first, again = [], []
    for _ in range(_SAMPLES):
        started = time.perf_counter()
        rules = RuleSet.of(policies).with_cgroups(cgroups_of)
        admitted = [rules.admit(pod, ()) for pod in pods]
        first.append((time.perf_counter() - started) * 1000)
        assert sum(len(one.rules) for one in admitted) == _PODS * _POLICIES // _NAMESPACES
        started = time.perf_counter()
        changed = rules.with_cgroups(cgroups_of | {"unit-0.service": (CgroupId(1 << 20, 2),)})
        assert [changed.admit(pod, ()) for pod in pods] != admitted
        again.append((time.perf_counter() - started) * 1000)
    figures.emit("policy", f"resolve_{_POLICIES}_policies_{_PODS}_pods_ms", first, "ms")
    figures.emit("policy", "resolve_again_ms", again, "ms")


def _start(agent: AgentProcess, rules: pathlib.Path, pods: list[LabPod]) -> None:
    rules.mkdir()
    documents = [_document(number, {"kernel": {}}) for number in range(_POLICIES - 1)]
    own = _document(_POLICIES - 1, {"systemdUnit": {"name": _UNIT}})
    own["spec"] |= {"pods": {"podSelector": {}}, "ports": [{"port": _PORT}]}
    (rules / "all.json").write_text(json.dumps({"kind": "List", "items": [*documents, own]}))
    for pod in pods:
        agent.write_manifest(pod, mode="enforce", container={})
    agent.start("--rules", str(rules))
    names = [pod.name for pod in pods]
    agent.wait_for("gates", lambda report: are_all_isolated(report, names=names, reason="Enforced"))


def _measure_changes(pod: LabPod, listener: socket.socket) -> None:
    samples = []
    with cgroups.cgroup("podgate-bench.slice") as above, cgroups.cgroup() as outside:
        for _ in range(_CHANGES):
            with _unit(above) as unit:
                started = time.perf_counter()
                unit.add(os.getpid())
                try:
                    polling.wait_until("the unit is admitted", lambda: _connects(pod))
                    samples.append((time.perf_counter() - started) * 1000)
                finally:
                    outside.add(os.getpid())
            listener.accept()[0].close()
            polling.wait_until("the unit is forgotten", lambda: not _connects(pod))
            # Changes are apart: nothing of one is still under way.
            time.sleep(0.05)
        _leave(outside)
    p99 = statistics.quantiles(samples, n=100)[98]
    figures.emit("policy", "follow_change_p99_ms", [p99], "ms")
    figures.emit("policy", "follow_change_p50_ms", samples, "ms")


@contextlib.contextmanager
def _unit(above: Cgroup) -> Iterator[Cgroup]:
    made = Cgroup(above.directory / _UNIT, f"{above.path}/{_UNIT}")
    made.directory.mkdir()
    try:
        yield made
    finally:
        made.directory.rmdir()


def _leave(outside: Cgroup) -> None:
    """This process goes back to the root, so that the cgroup can be removed."""
    (outside.directory.parent / "cgroup.procs").write_text(str(os.getpid()))


def _connects(pod: LabPod) -> bool:
    """Whether a new socket of this process connects; a rejection is immediate."""
    with socket.socket() as sock:
        sock.settimeout(0.5)
        try:
            sock.connect((pod.ipv4, _PORT))
        except OSError:
            return False
        return True


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
