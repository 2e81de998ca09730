"""A node of a cluster for faults: pods that a kubelet and an intruder try all the time, stand-ins
of API server and runtime, and one agent whose system calls may fail."""

import asyncio
import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO

from agent import labels
from agent.admin.report import AgentReport
from agent.app import removal
from agent.lab.agent_process import AgentProcess, condition_of
from agent.lab.lab import Lab, LabPod
from agent.pods.conditions import TRUE
from bpf import abi, map_specs, maps, pins
from tests import processes
from tests.agent.kube.conftest import write_kubeconfig
from tests.faults import clients, seccomp, standins
from tests.faults.clients import Client
from tests.faults.injector import Injector
from tests.faults.standins import Standin
from tests.faults.witness import Witness
from tests.kernel import cgroups, fleet
from tests.kernel.strictnode import RANGE4, RANGE6
from tests.polling import PATIENCE, wait_until

_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
_REASONS = {"": "Enforced", "enforce": "Enforced", "strict": "Strict"}
# As the kubelet's timeoutSeconds.
_PROBE_SECONDS = 1.0 * PATIENCE
# A SYN from the millisecond in which a relay ends is sent again after a second.
_STRICT_PROBE_SECONDS = 3.5 * PATIENCE
BEAT_SECONDS = 2.0 * PATIENCE
_SAMPLE_SECONDS = 0.02
# Of components that have run again for less than a minute, and of a pod that has just come.
_LASTING = frozenset({"component-failing", "existing-flows"})


class Node:
    """One agent and its pods. `start` it first."""

    def __init__(self, lab: Lab, operator: AgentProcess, installation: pins.Pins) -> None:
        self.lab = lab
        self.operator = operator
        self.run_directory = operator.run_directory
        self.modes: dict[str, str] = {}
        """Of the pods that exist."""
        self._stack = contextlib.ExitStack()
        enter, callback = self._stack.enter_context, self._stack.callback
        self._fleet = enter(fleet.fleet(operator.log.parent))
        kubelet, intruder = enter(cgroups.cgroup()), enter(cgroups.cgroup())
        self.kubelet = Client(kubelet, clients.KUBELET)
        callback(self.kubelet.close)
        self.intruder = Client(intruder, clients.INTRUDER)
        callback(self.intruder.close)
        self.injector = Injector()
        callback(self.injector.close)
        self.witness = Witness()
        callback(self.witness.close)
        self.api = Standin("api", "0")
        callback(self.api.kill)
        self.runtime = Standin("runtime", str(operator.log.with_name("cri.sock")))
        callback(lambda: self.runtime.kill())
        self.residents: frozenset[str] = frozenset()
        """Pods that stay."""
        self._process: subprocess.Popen[bytes] | None = None
        self._probed: set[str] = set()
        self.lost_in_strict: list[str] = []
        self._conditions: dict[tuple[str, str], str] = {}
        self._unready: list[str] = []
        self._strict: set[str] = set()
        """Addresses of pods in strict, also of those that are gone."""
        self._numbers = iter(range(1, 1 << 30))
        self.heartbeat = _Heartbeat(installation, self.injector.pid)
        callback(self.heartbeat.close)
        self.run_directory.mkdir()
        assert mount_error(self.run_directory, "size=512k,nr_inodes=256,mode=0755") == 0
        callback(lambda: _libc.umount2(os.fsencode(self.run_directory), _MNT_DETACH))
        kubeconfig = operator.log.with_name("kubeconfig")
        write_kubeconfig(kubeconfig, f"http://127.0.0.1:{self.api.where}")
        operator.launch = self._launch
        operator.kubelet = ("--kubelet", f"cgroup:{kubelet.path}")
        operator.pods_from = (
            *("--node-name", standins.NODE, "--kubeconfig", str(kubeconfig)),
            *("--cri-socket", str(self.runtime.where)),
        )
        self._baseline: frozenset[str] | None = None
        """Kinds of findings of an agent that serves all pods; None while it starts."""
        self.attempts = {clients.KUBELET: 0, clients.INTRUDER: 0}
        """Since `probe_all`."""

    def close(self) -> None:
        self.operator.stop(signal.SIGKILL)
        self._stack.close()

    @property
    def has_ended(self) -> bool:
        """Whether the agent has exited."""
        return self._process is not None and self._process.poll() is not None

    def start_agent(self) -> None:
        self.operator.start(
            *("--mode", "enforce", "--relay-range4", RANGE4, "--relay-range6", RANGE6)
        )

    def start(self) -> None:
        """Start an agent, and wait until it serves all pods."""
        self.start_agent()
        self.residents = self.residents or frozenset(self.modes)
        report = self.operator.wait_for("every pod in its mode", lambda one: not self.lacks(one))
        self._baseline = frozenset(finding.kind for finding in report.findings)

    def start_again(self) -> None:
        """Another agent, after one that failed."""
        self.operator.stop(signal.SIGKILL)
        self._baseline = None
        self.start()

    def add(self, mode: str, *, is_bridged: bool = False) -> str:
        """A pod comes: in the runtime first, then in the API. Returns its name."""
        number = next(self._numbers)
        name = f"pod{number}"
        pod = self.lab.add_pod(name, (number - 1) % 250 + 1, bridged=is_bridged)
        self.modes[name] = mode
        if mode == "strict":
            self._strict.add(pod.ipv4)
        else:
            self._strict.discard(pod.ipv4)
        self._fleet.serve(pod, [fleet.HTTP])
        self._set_targets()
        place = {
            "name": name,
            "ipv4": pod.ipv4,
            "ipv6": pod.ipv6,
            "netns": pod.netns.path,
        }
        self.runtime.send({"do": "add", **place})
        addresses = [pod.ipv4, pod.ipv6]
        made = {"name": name, "mode": mode, "port": fleet.HTTP, "addresses": addresses}
        self.api.send({"do": "add", "pod": made})
        return name

    def remove(self, name: str) -> None:
        """It goes, in the same order."""
        del self.modes[name]
        self._set_targets()
        self.runtime.send({"do": "remove", "name": name})
        self._fleet.leave(self.lab.pods[name])
        self.lab.remove_pod(name)
        self.api.send({"do": "remove", "name": name})

    def probe_all(self) -> None:
        """From now on the kubelet probes all pods that exist, and each probe counts."""
        self._probed = set(self.modes)
        self._set_targets()
        for client in (self.kubelet, self.intruder):
            client.start_again()
        self.attempts = dict.fromkeys(self.attempts, 0)
        self.heartbeat.take()
        self._read_conditions()
        self._unready.clear()

    def _read_conditions(self) -> None:
        """What the agent has written to the API server."""
        for one in self.api.report():
            self._conditions[one["pod"], one["type"]] = one["status"]
            is_well = one["pod"] in self._probed and one["pod"] in self.modes
            if one["status"] != TRUE and is_well:
                self._unready.append(
                    f"{one['type']} of {one['pod']}, which is well, became {one['status']}: "
                    f"{one['message']}"
                )

    def noted(self) -> list[str]:
        """What may not happen and did since the last call."""
        probes, lost = self.kubelet.take()
        connects, admitted = self.intruder.take()
        self.attempts[clients.KUBELET] += probes
        self.attempts[clients.INTRUDER] += connects
        self.lost_in_strict = [line for line in lost if line.partition(":")[0] in self._strict]
        found = [line for line in lost if line not in self.lost_in_strict]
        found += admitted
        age = self.heartbeat.take()
        if age > BEAT_SECONDS:
            found.append(f"heartbeat {age:.2f} s old")
        found += self._unready
        self._unready = []
        return found

    def lacks(self, report: AgentReport) -> str:
        """Why the node is not as it was before any fault; empty if it is."""
        if report.pid != self.operator.pid:
            return f"the report is of process {report.pid}"
        if not report.is_synced:
            return f"not synchronised: {report.unsynced}"
        if {pod.name for pod in report.pods} != set(self.modes):
            return f"the agent has the pods {sorted(pod.name for pod in report.pods)}"
        for name, mode in self.modes.items():
            for kind, reason in (
                (labels.ISOLATION_READY, _REASONS[mode]),
                (labels.PROBES_PASSING, "ProbesPassing"),
            ):
                found = condition_of(report, name, kind)
                if found is None or (found.status, found.reason) != (TRUE, reason):
                    return f"{kind} of {name} is {found}"
        if not report.relay.is_up:
            return f"no relay: {report.relay.problem}"
        if self._baseline is not None:
            kinds = {one.kind: one.sentence for one in report.findings}
            for kind in kinds.keys() - self._baseline - _LASTING:
                return f"finding {kind}: {kinds[kind]}"
        self._read_conditions()
        for name in self.modes:
            for kind in (labels.ISOLATION_READY, labels.PROBES_PASSING):
                if (written := self._conditions.get((name, kind))) != TRUE:
                    return f"{kind} of {name} is {written} in the API"
        return ""

    def relay_pids(self) -> list[int]:
        """Of all relays that the agent runs."""
        return [
            pid
            for pid in _children(self.operator.pid)
            if b"agent.relay" in _read(f"/proc/{pid}/cmdline")
        ]

    def _launch(
        self, arguments: Sequence[str], log: IO[bytes], errors: IO[bytes] | None = None, /
    ) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.filtered", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=errors or log,
        )
        listener = wait_until("its filter", lambda: seccomp.listener_of(process.pid))
        assert listener is not None
        self.injector.answer(process.pid, listener)
        self._process = process
        self.heartbeat.agent = process.pid
        return process

    def _pods(self) -> list[LabPod]:
        return list(self.lab.pods.values())

    def _set_targets(self) -> None:
        pods = [pod for pod in self._pods() if pod.name in self.modes]
        probed = [pod for pod in pods if pod.name in self._probed]
        self.intruder.set_targets(
            [(ip, fleet.HTTP, 0) for pod in pods for ip in (pod.ipv4, pod.ipv6)]
        )
        limits = {"strict": _STRICT_PROBE_SECONDS}
        self.kubelet.set_targets(
            [
                (pod.ipv4, fleet.HTTP, limits.get(self.modes[pod.name], _PROBE_SECONDS))
                for pod in probed
            ]
        )


class _Heartbeat:
    """Reads the age of the agent's heartbeat all the time, as gates do.

    Without the time for which agent and injector waited for a processor: on a busy machine an agent
    at a low priority is late by that.
    """

    def __init__(self, installation: pins.Pins, injector: int) -> None:
        """injector: its process."""
        self._map = maps.Map.open(installation.map(map_specs.CONFIG), map_specs.CONFIG)
        self._injector = injector
        self.agent = 0
        """Its process; 0 before the first."""
        self._oldest_seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def take(self) -> float:
        """The highest age in seconds since the last call."""
        oldest, self._oldest_seconds = self._oldest_seconds, 0.0
        return oldest

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._map.close()

    def _run(self) -> None:
        previous, waited = 0, 0
        while not self._ended.wait(_SAMPLE_SECONDS):
            value = self._map.get(bytes(4))
            now = time.monotonic_ns()
            assert value is not None
            beat = abi.CConfig.from_buffer_copy(value).heartbeat_ns
            if beat != previous:
                previous, waited = beat, self._waited_ns()
            age = now - beat - (self._waited_ns() - waited)
            self._oldest_seconds = max(self._oldest_seconds, age / 1e9)

    def _waited_ns(self) -> int:
        return processes.waited_ns(str(self.agent), str(self._injector))


def mount_error(directory: pathlib.Path, options: str, flags: int = 0) -> int:
    """Mount a tmpfs, or give it other options. The number of the error, or 0."""
    if _libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", flags, options.encode()) == 0:
        return 0
    return ctypes.get_errno()


@contextlib.contextmanager
def running(lab: Lab, operator: AgentProcess, installation: pins.Pins) -> Iterator[Node]:
    """A node with an agent and one pod in each mode."""
    made = Node(lab, operator, installation)
    try:
        for mode in ("", "strict"):
            made.add(mode)
        made.start()
        made.probe_all()
        yield made
    finally:
        made.close()
        asyncio.run(removal.remove_relays())


def _children(parent: int) -> list[int]:
    text = _read(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in text.split()]


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return pathlib.Path(path).read_bytes()
    return b""
