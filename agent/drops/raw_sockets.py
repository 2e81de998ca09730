"""Raw and packet sockets that pods' containers create in the host's network namespace without a
policy: reported by source."""

import asyncio
import pathlib
import socket
from collections.abc import Iterator

import msgspec
import structlog
from prometheus_client import core

from agent import batches, tasks
from agent.admin.report import RawSocketSourceStatus, RawSocketStatus
from agent.drops.source_processes import SourceProcesses, wall_clock
from agent.linux import cgroups
from agent.linux.procfs import Procfs
from agent.logs import Event
from agent.metrics import MetricFamily, labelled, single
from agent.settings import RawSocketMode
from bpf.node_config import NodeConfig
from bpf.raw_socket_policy import RawSocketPolicy, RawSocketSource
from bpf.verdicts import Verdict

log = structlog.get_logger(__name__)

# A cgroup may be gone a moment after its only socket, and then its path is lost.
_PERIOD_SECONDS = 2.0

FAMILIES: dict[int, str] = {
    socket.AF_INET: "raw IPv4",
    socket.AF_INET6: "raw IPv6",
    socket.AF_PACKET: "packet",
}
"""In words, by address family."""

RAW_SOCKETS = MetricFamily(
    "podgate_raw_sockets_total",
    "counter",
    "Raw and packet sockets that pods created, or tried to, in the host's network namespace "
    "without a policy, by family and verdict.",
    ("family", "verdict"),
)
PACKET_SOCKETS_REJECTABLE = MetricFamily(
    "podgate_packet_sockets_rejectable",
    "gauge",
    "1 if the kernel can reject packet sockets; with 0 --raw-sockets=deny-pods rejects raw sockets "
    "only, and packet sockets are counted while they exist.",
)


class RawSocketSources:
    """Follows the kernel's sources, and where it has none of packet sockets, those in /proc."""

    def __init__(
        self,
        policy: RawSocketPolicy,
        mode: RawSocketMode,
        config: NodeConfig,
        names: SourceProcesses,
    ) -> None:
        """names: of cgroups."""
        self._policy = policy
        self._mode = mode
        self._config = config
        self._names = names
        self._procfs = Procfs()
        self._cgroup2 = cgroups.cgroup2_mount()
        self._logged: set[tuple[int, int, Verdict]] = set()
        self._listed: set[str] = set()

    async def run(self) -> None:
        """Log new sources until cancelled."""
        while True:
            if self._policy.has_sources or self._has_new_packet_sockets():
                await batches.in_thread(self._look)
            await tasks.tick(_PERIOD_SECONDS)

    async def report(self) -> RawSocketStatus:
        found = await asyncio.to_thread(self._read)
        return msgspec.structs.replace(self.summary(), sources=found)

    def summary(self) -> RawSocketStatus:
        """The report without sources. Reads a few map elements."""
        counts = self._policy.counts().items()
        rejected = sum(count for (_, verdict), count in counts if verdict is Verdict.DROP)
        return RawSocketStatus(
            mode=self._mode.value, problem=self.problem, sources=[], rejected=rejected
        )

    @property
    def problem(self) -> str:
        """What is not rejected though it should be, in one sentence; else empty."""
        if self._mode is not RawSocketMode.DENY_PODS:
            return ""
        if not self._policy.denies_pods:
            return "policies are not known yet, so none is rejected."
        config = self._config.read()
        if not config.node_netns:
            return "this kernel has no netns cookies (Linux 5.14), so none is rejected."
        if not config.pods_cgroup:
            return "the cgroup of pods is not found, so none is rejected."
        if self._policy.packet_problem:
            return f"packet sockets are only counted: {self._policy.packet_problem}"
        return ""

    def collect(self) -> Iterator[core.Metric]:
        """For Prometheus; to be registered once. Reads a few map elements."""
        counts = self._policy.counts().items()
        yield labelled(
            RAW_SOCKETS,
            (((FAMILIES[family], verdict.label), count) for (family, verdict), count in counts),
        )
        yield single(PACKET_SOCKETS_REJECTABLE, not self._policy.packet_problem)

    def _has_new_packet_sockets(self) -> bool:
        """Whether there may be some. Reads a short list in memory, of a node with few of them."""
        return bool(self._policy.packet_problem) and not (
            self._procfs.packet_sockets() <= self._listed
        )

    def _look(self) -> None:
        if self._policy.packet_problem:
            self._list_packet_sockets()
        sources = {_key(seen): seen for seen in self._policy.sources()}
        new = [seen for key, seen in sources.items() if key not in self._logged]
        self._logged = set(sources)
        self._names.learn({seen.cgroup for seen in new})
        for seen in new:
            write = log.warning if seen.verdict is Verdict.DROP else log.info
            write(
                Event.RAW_SOCKET_CREATED,
                cgroup=self._names.cgroup_path(seen.cgroup),
                process=seen.process_name,
                family=FAMILIES[seen.family],
                verdict=seen.verdict.label,
            )

    def _read(self) -> list[RawSocketSourceStatus]:
        """The busiest first."""
        found = sorted(self._policy.sources(), key=lambda seen: -seen.count)
        self._names.learn({seen.cgroup for seen in found})
        return [
            RawSocketSourceStatus(
                cgroup=self._names.cgroup_path(seen.cgroup),
                process=seen.process_name,
                family=FAMILIES[seen.family],
                verdict=seen.verdict.label,
                sockets=seen.count,
                first=wall_clock(seen.first_ns),
                last=wall_clock(seen.last_ns),
            )
            for seen in found
        ]

    def _list_packet_sockets(self) -> None:
        """Record those that are new and that a pod's process holds, once for each."""
        listed = self._procfs.packet_sockets()
        new = listed - self._listed
        self._listed = listed
        pods = self._config.read()
        if not new or not pods.pods_cgroup or self._cgroup2 is None:
            return
        for pid in self._procfs.pids():
            ids = _cgroups_of(self._procfs, pid, self._cgroup2)
            level = pods.pods_cgroup_level
            if len(ids) <= level or ids[level] != pods.pods_cgroup or self._is_admitted(ids):
                continue
            held = new & self._procfs.sockets(pid)
            new -= held
            for _ in held:
                self._policy.record_packet_socket(ids[-1], self._procfs.name(pid))

    def _is_admitted(self, ids: list[int]) -> bool:
        admitted = self._policy.admitted()
        return ids[-1] in admitted or any(admitted.get(above) for above in ids)


def _cgroups_of(procfs: Procfs, pid: int, root: pathlib.Path) -> list[int]:
    path = procfs.cgroup(pid)
    return [] if path is None else cgroups.ancestors(root, path)


def _key(seen: RawSocketSource) -> tuple[int, int, Verdict]:
    return seen.cgroup, seen.family, seen.verdict
