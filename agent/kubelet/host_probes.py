"""Keeps the kubelet from connecting where the `host` of a probe or hook sends it (KEP-4559).

Its author needs no right to reach that address: the kubelet's connection comes from the node. With
`--kubelet-host-probes=deny` the hook at connect rejects exactly those address and port pairs to the
kubelet's cgroup, while a pod of this node names them. Never rejected:

* what a pod of the host network names, other pods' probes of the same pair included: the node is
  its own network (kubeadm's static pods probe 127.0.0.1, Cilium's agent, too), and its author may
  connect from there anyway;
* a name, since the kubelet may resolve it to something else each time;
* the API server in the kubelet's own kubeconfig, or its port on any address if it has a name there;
* anything while the kubelet's API server is unknown, or if other programs share its cgroup.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Iterable, Iterator

import structlog
from prometheus_client import core

from agent.admin.report import HostProbeStatus
from agent.kubelet import api_server
from agent.kubelet.api_server import KubeletApiServer, KubeletConfigError
from agent.kubelet.identity import KubeletIdentity
from agent.kubelet.search import KubeletCgroup
from agent.logs import Event
from agent.metrics import MetricFamily, single
from agent.pods.changes import Subscription
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.settings import HostProbeMode
from bpf.host_probes import HostProbes, Target

log = structlog.get_logger(__name__)

# The kubelet's configuration may change with a restart of it, which is noticed sooner.
_PERIOD_SECONDS = 60.0
_READ_SECONDS = 10.0

DENIED = MetricFamily(
    "podgate_denied_host_probe_connections",
    "gauge",
    "Connections of the kubelet that were rejected, to addresses that probes and hooks of this "
    "node's pods name as host now.",
)
DENIED_TARGETS = MetricFamily(
    "podgate_denied_host_probe_targets",
    "gauge",
    "Address and port pairs that the kubelet may not connect to (--kubelet-host-probes=deny).",
)


class KubeletHostProbes:
    """The one writer of the rejected pairs."""

    def __init__(
        self,
        host_probes: HostProbes,
        mode: HostProbeMode,
        *,
        store: PodStore,
        kubelet: KubeletIdentity,
        has_connect_hooks: Callable[[], bool],
    ) -> None:
        """has_connect_hooks: as now, since they are attached after this."""
        self._host_probes = host_probes
        self._mode = mode
        self._store = store
        self._kubelet = kubelet
        self._has_connect_hooks = has_connect_hooks
        self._wake = asyncio.Event()
        store.desired.subscribe(Subscription(self._wake))
        self.problem = ""
        """Why nothing is rejected although it should be, in one sentence; else empty."""
        self._logged: object = None

    def hint(self) -> None:
        """The kubelet may have been found, or lost."""
        self._wake.set()

    async def run(self) -> None:
        """Follow pods and the kubelet until cancelled."""
        while True:
            self._wake.clear()
            targets = await self._targets()
            left_out = self._host_probes.replace(targets)
            self._log(targets, left_out)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._wake.wait()

    async def _targets(self) -> set[Target]:
        found = named_targets(self._store.desired_pods())
        self.problem = ""
        if self._mode is not HostProbeMode.DENY or not found:
            return set()
        try:
            servers = await self._api_servers(self._kubelet.current)
        except KubeletConfigError as error:
            self.problem = f"Probes and hooks with host are not denied: {error}."
            return set()
        return without(found, servers)

    async def _api_servers(self, kubelet: KubeletCgroup | None) -> list[KubeletApiServer]:
        """Raises `KubeletConfigError`."""
        if not self._has_connect_hooks():
            raise KubeletConfigError("the hooks at connect do not work")
        if kubelet is None or kubelet.pid is None:
            raise KubeletConfigError("the kubelet's process is unknown")
        if kubelet.is_shared:
            raise KubeletConfigError("other programs share the kubelet's cgroup")
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await asyncio.to_thread(api_server.read, kubelet.pid)
        except TimeoutError as error:
            raise KubeletConfigError("reading the kubelet's kubeconfig timed out") from error

    def status(self) -> HostProbeStatus:
        """For the agent's report. Reads a map if connections are rejected."""
        is_denying = self._mode is HostProbeMode.DENY
        rejected = sum(self._host_probes.counts().values()) if is_denying else 0
        return HostProbeStatus(mode=self._mode.value, problem=self.problem, rejected=rejected)

    def _log(self, targets: set[Target], left_out: int) -> None:
        state = (frozenset(targets), self.problem, left_out)
        if state == self._logged or (self._logged is None and not targets and not self.problem):
            return
        self._logged = state
        record = log.warning if self.problem or left_out else log.info
        record(
            Event.HOST_PROBES_DENIED,
            targets=len(targets) - left_out,
            left_out=left_out,
            problem=self.problem,
        )

    def collect(self) -> Iterator[core.Metric]:
        """For Prometheus; to be registered once."""
        counts = self._host_probes.counts()
        yield single(DENIED_TARGETS, len(counts))
        yield single(DENIED, sum(counts.values()))


def named_targets(pods: Iterable[Pod]) -> set[Target]:
    """Address and port pairs of probes and hooks, but for the pods' own addresses, and for all
    that pods of the host network name."""
    named: dict[bool, set[Target]] = {True: set(), False: set()}
    for pod in pods:
        for host in pod.spec.hosts:
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(host.host)
                if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
                    address = address.ipv4_mapped
                if address not in pod.reported_addresses and host.port:
                    named[pod.host_network].add((address, host.port))
    return named[False] - named[True]


def without(targets: set[Target], servers: Iterable[KubeletApiServer]) -> set[Target]:
    """Those that cannot be a connection to an API server."""
    listed = list(servers)
    return {
        (address, port)
        for address, port in targets
        if not any(server.covers(address, port) for server in listed)
    }
