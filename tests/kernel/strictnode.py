"""A node with a fleet of pods, an agent, and a cgroup that is the kubelet's."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import pathlib
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from agent import labels
from agent.admin.report import AgentReport
from agent.app import removal
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, Launch, condition_of
from agent.lab.lab import LabPod
from agent.linux.procfs import Procfs
from agent.pods.conditions import TRUE
from bpf import abi, map_specs, maps, pins
from tests import polling
from tests.kernel import capture, cgroups, fleet, offers
from tests.kernel.capture import IPNetwork, node_addresses
from tests.kernel.cgroups import Cgroup

RANGE4, RANGE6 = "198.18.64.0/18", "fd00:18:64::/64"
REASONS = {"audit": "Audit", "enforce": "Enforced", "strict": "Strict"}

Probes = tuple[dict[str, Any], ...]


@dataclasses.dataclass(slots=True)
class FleetPod:
    """A pod, with the probes, their kind and the mode of its manifest."""

    pod: LabPod
    probes: Probes
    mode: str
    kind: str = "livenessProbe"

    def targets(self, kind: str, port: int) -> list[str]:
        """Of a client's: both families."""
        return [f"{kind},{host},{port}" for host in (self.pod.ipv4, self.pod.ipv6)]


class Node:
    """Builds pods, sets their desired state, and waits until the agent has applied it."""

    def __init__(
        self, lab: labs.Lab, served: fleet.Fleet, operator: AgentProcess, kubelet: Cgroup
    ) -> None:
        self.lab = lab
        self.fleet = served
        self.operator = operator
        self.kubelet = kubelet
        self.pods: dict[str, FleetPod] = {}

    def add(
        self,
        name: str,
        number: int,
        *,
        ports: Iterable[int],
        probes: Probes,
        mode: str = "enforce",
        bridged: bool = False,
        kind: str = "livenessProbe",
    ) -> FleetPod:
        """Add a pod that serves these ports and declares these probes. Writes its manifest."""
        pod = self.lab.add_pod(name, number, bridged=bridged)
        made = self.pods[name] = FleetPod(pod, probes, mode, kind)
        self.fleet.serve(pod, ports)
        self.declare(made)
        return made

    def declare(self, pod: FleetPod) -> None:
        content = fleet.manifest(pod.pod, pod.mode, pod.probes, kind=pod.kind)
        self.operator.write_file(f"{pod.pod.name}.yaml", content)

    def remove(self, name: str) -> None:
        """As when a pod ends: servers, namespace, interface, and then its manifest."""
        self.fleet.leave(self.pods.pop(name).pod)
        self.lab.remove_pod(name)
        (self.operator.manifests / f"{name}.yaml").unlink()

    @property
    def options(self) -> tuple[str, ...]:
        """Of each agent of this node."""
        ranges = ("--relay-range4", RANGE4, "--relay-range6", RANGE6)
        return ("--kubelet", f"cgroup:{self.kubelet.path}", *ranges)

    def start(self, *extra: str) -> None:
        """Start the agent, and wait until every pod is as it is wanted."""
        self.operator.start(*self.options, *extra)
        self.settle()

    def set_mode(self, mode: str) -> None:
        """Of all pods."""
        for pod in self.pods.values():
            pod.mode = mode
            self.declare(pod)
        self.settle()

    def settle(self, by: AgentProcess | None = None) -> AgentReport:
        """Wait until every pod is as it is wanted. by: the agent that holds the node, if that is
        not the operator's."""
        agent = by or self.operator

        def is_settled(report: AgentReport) -> bool:
            return report.pid == agent.pid and self._is_settled(report)

        return agent.wait_for("every pod isolated as wanted", is_settled)

    def _is_settled(self, report: AgentReport) -> bool:
        return (
            report.is_synced
            and report.kubelet == self.kubelet.path
            and len(report.pods) == len(self.pods)
            and all(
                (condition := condition_of(report, name, labels.ISOLATION_READY)) is not None
                and (condition.status, condition.reason) == (TRUE, REASONS[pod.mode])
                for name, pod in self.pods.items()
            )
        )

    def relay_pid(self) -> int | None:
        """Of the newest relay that the agent runs."""
        # Numbers begin again after the highest one.
        return max(self.relay_pids(), key=lambda pid: Procfs().started(pid) or 0, default=None)

    def relay_pids(self) -> list[int]:
        """Of all relays that the agent runs: those that drain, too."""
        return [pid for pid in _children(self.operator.pid) if b"agent.relay" in _command(pid)]

    @contextlib.contextmanager
    def watched(self) -> Iterator[Callable[[], list[str]]]:
        """Capture at all pods' interfaces; yields a function that returns the host's packets."""
        with capture.capture(pod.pod for pod in self.pods.values()) as captured:
            yield lambda: captured.seen(self.own_networks())

    def own_networks(self) -> list[IPNetwork]:
        """What is not a pod's: every address of the node, and the relay's ranges."""
        ranges: list[IPNetwork] = [
            ipaddress.IPv4Network(RANGE4),
            ipaddress.IPv6Network(RANGE6),
        ]
        return node_addresses() + ranges


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _children(parent: int) -> list[int]:
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # After the command's name, which may hold anything: state, parent.
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[1]) == parent:
                found.append(int(directory.name))
    return sorted(found)


def relay_addresses(bpffs: pathlib.Path) -> dict[str, str]:
    """The relay's address for each address of a pod."""
    spec = map_specs.RELAY_PODS
    table = maps.Map.open(pins.Pins(bpffs).map(spec), spec)
    try:
        found = {}
        for key, value in table.items():
            origin = abi.CRelayPod.from_buffer_copy(value)
            found[_text(bytes(origin.pod))] = _text(key)
        return found
    finally:
        table.close()


def _text(packed: bytes) -> str:
    """As `struct address` has it: IPv4 is mapped."""
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


def wait_until(what: str, holds: Callable[[], bool], *, patience: float = 1) -> None:
    """Poll for a state that no report of the agent shows. patience: a multiple of the limit."""
    polling.wait_until(what, holds, seconds=patience * polling.PATIENCE_SECONDS)


@contextlib.contextmanager
def strict_node(
    lab: labs.Lab, folder: pathlib.Path, launch: Launch, installed: pins.Pins
) -> Iterator[Node]:
    """folder: for manifests, the agent's files and a certificate. All of it ends with the block,
    and so does what is pinned in `installed`."""
    offers.need_netns_cookie()
    operator = AgentProcess(folder, installed.bpffs, launch)
    with cgroups.cgroup() as kubelet, fleet.fleet(folder) as served:
        try:
            yield Node(lab, served, operator, kubelet)
        finally:
            operator.stop(signal.SIGKILL)
            asyncio.run(removal.remove_relays())
            installed.remove_everything()
