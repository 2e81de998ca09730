"""The kubelet's access to pods: its identity, and what gates and hooks admit because of it."""

from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import registry

from agent.app.open_ports import OpenPorts
from agent.default_deny.controller import DefaultDenyController
from agent.gates.worker import GateWorker
from agent.kubelet.admission import KubeletAdmission
from agent.kubelet.host_probes import KubeletHostProbes
from agent.kubelet.identity import KubeletIdentity
from agent.kubelet.search import KubeletCgroup
from agent.pods.store import PodStore
from agent.settings import Settings
from bpf.host_probes import HostProbes


class KubeletAccess:
    """Its parts. A kubelet that is found or lost changes them all, and the default-deny table.

    To be created on the loop.
    """

    def __init__(
        self,
        settings: Settings,
        gate_worker: GateWorker,
        *,
        store: PodStore,
        default_deny: DefaultDenyController,
        on_changed: Callable[[], None],
    ) -> None:
        """on_changed: called when the kubelet may have been found or lost."""
        self._default_deny = default_deny
        self._on_changed = on_changed
        self.admission = KubeletAdmission(
            settings.kubelet,
            gate_worker.config,
            gate_worker.kubelet_unit,
            has_connect_hooks=lambda: gate_worker.has_connect_hooks,
        )
        self.identity = KubeletIdentity(settings.kubelet, self._update)
        self.open_ports = OpenPorts(store=store, kubelet=self.identity, admission=self.admission)
        self.host_probes = KubeletHostProbes(
            HostProbes(gate_worker.loaded),
            settings.kubelet_host_probes,
            store=store,
            kubelet=self.identity,
            has_connect_hooks=lambda: gate_worker.has_connect_hooks,
        )

    @property
    def path(self) -> str | None:
        """Of the kubelet's cgroup; None while it is unknown."""
        current = self.identity.current
        return current.path if current else None

    @property
    def collectors(self) -> tuple[registry.Collector, ...]:
        return self.admission, self.host_probes

    def tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What runs as long as the agent does, by name."""
        yield "kubelet", self.identity.run
        yield "open-ports", self.open_ports.run
        yield "host-probes", self.host_probes.run

    def write_again(self) -> None:
        """Write the current kubelet again: what follows it was attached or detached."""
        self._update(self.identity.current)

    def _update(self, found: KubeletCgroup | None) -> None:
        self.admission.update(
            found, is_rejected=self.identity.is_rejected, is_overdue=self.identity.is_overdue
        )
        self._default_deny.set_kubelet(
            found, self.admission.priority, has_cgroup=self.admission.has_cgroup
        )
        self._on_changed()
        self.open_ports.hint()
        self.host_probes.hint()
