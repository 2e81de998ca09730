"""Pods by name: of the agent's report while it is alive, and of what it has saved. Blocks."""

import dataclasses
import ipaddress
import pathlib
from collections.abc import Iterable

import msgspec

from agent.admin.observations import ObservedPod
from agent.admin.report import AgentReport, PodStatus
from agent.drops.merging import pod_uid
from agent.errors import PodgateError
from agent.kube.objects import ApiPod, newest
from agent.kube.saved_pods import SavedPods
from agent.listing import full_name
from bpf.abi import IPAddress


class PodNotFoundError(PodgateError):
    """No pod of this node has that name, or several have; one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPod:
    """status: of the agent's report; saved: its API object as last seen. One of them may be None.

    addresses: those that the agent or the API reports for it.
    """

    namespace: str
    name: str
    uid: str
    addresses: tuple[IPAddress, ...] = ()
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    host_network: bool = False
    status: PodStatus | None = None
    saved: ApiPod | None = None

    @property
    def own_addresses(self) -> tuple[IPAddress, ...]:
        """Those that are this pod's as far as is known: an unconfirmed one may be another pod's."""
        unconfirmed = self.status.unconfirmed if self.status else {}
        return tuple(found for found in self.addresses if str(found) not in unconfirmed)

    @property
    def full_name(self) -> str:
        return full_name(self.namespace, self.name)


class NamedPods:
    """The pods of this node, as far as they are known."""

    def __init__(
        self,
        report: AgentReport | None,
        saved: SavedPods | None,
        gated: Iterable[tuple[ObservedPod, tuple[IPAddress, ...]]] = (),
    ) -> None:
        """gated: pods that the agent has saved, and the confirmed addresses of their gates."""
        self._pods: dict[str, NamedPod] = {}
        self.namespace_labels: dict[str, dict[str, str]] = {}
        if saved is not None:
            self.namespace_labels = {
                found.metadata.name: found.metadata.labels for found in saved.namespaces.objects
            }
            of_kubelet = {pod.uid: pod for pod in saved.kubelet}
            of_api = {pod.uid: pod for pod in saved.pods}
            for uid in of_api.keys() | of_kubelet.keys():
                if pod := newest(of_api.get(uid), of_kubelet.get(uid)):
                    self._pods[uid] = _saved(pod)
        for status in report.pods if report else ():
            self._pods[status.uid] = _reported(status, self._pods.get(status.uid))
        by_name = {pod.full_name: pod for pod in self._pods.values()}
        for observed, addresses in gated:
            made = _gated(observed, addresses)
            reported = by_name.get(made.full_name)
            if reported is None:
                self._pods[made.full_name] = made
            elif reported.saved is None:
                # Without an API server, nothing else has its labels.
                self._pods[reported.uid] = dataclasses.replace(reported, labels=observed.labels)

    def find(self, name: str) -> NamedPod:
        """name: `name` or `namespace/name`. Raises `PodNotFoundError`."""
        found = [pod for pod in self._pods.values() if name in (pod.name, pod.full_name)]
        if len(found) > 1:
            names = ", ".join(sorted(pod.full_name for pod in found))
            raise PodNotFoundError(f"several pods are named {name}; use one of {names}")
        if not found:
            raise PodNotFoundError(
                f"no pod {name} is known on this node; 'kubectl get pods -A -o wide' shows the "
                "node of each, and an address works without names"
            )
        return found[0]

    def with_address(self, address: IPAddress) -> NamedPod | None:
        """The pod that has it alone; an unconfirmed one counts if no other pod has it."""
        pods = [pod for pod in self._pods.values() if not pod.host_network]
        owners = [pod for pod in pods if address in pod.own_addresses]
        found = owners or [pod for pod in pods if address in pod.addresses]
        return found[0] if len(found) == 1 else None

    def of_cgroup(self, path: str) -> NamedPod | None:
        """The pod that a cgroup belongs to."""
        return self._pods.get(pod_uid(path))


def read_saved(run_directory: pathlib.Path) -> SavedPods | None:
    """What the agent has saved of the API's pods; None if there is nothing readable."""
    try:
        content = (run_directory / "state" / "pods.json").read_bytes()
        return msgspec.json.decode(content, type=SavedPods)
    except (OSError, msgspec.MsgspecError):
        return None


def _saved(pod: ApiPod) -> NamedPod:
    return NamedPod(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        uid=pod.uid,
        addresses=_addresses(found.ip for found in pod.status.pod_ips),
        labels=pod.metadata.labels,
        host_network=pod.spec.host_network,
        saved=pod,
    )


def _reported(status: PodStatus, saved: NamedPod | None) -> NamedPod:
    return NamedPod(
        namespace=status.namespace,
        name=status.name,
        uid=status.uid,
        addresses=_addresses([*status.addresses, *status.unconfirmed]),
        labels=saved.labels if saved else {},
        host_network=saved.host_network if saved else _is_host_network(status),
        status=status,
        saved=saved.saved if saved else None,
    )


def _gated(pod: ObservedPod, addresses: tuple[IPAddress, ...]) -> NamedPod:
    """Its uid is not saved."""
    return NamedPod(
        namespace=pod.namespace,
        name=pod.name,
        uid="",
        addresses=addresses,
        labels=pod.labels,
        host_network=pod.host_network,
    )


def _is_host_network(status: PodStatus) -> bool:
    return any(condition.reason == "HostNetwork" for condition in status.conditions)


def _addresses(texts: Iterable[str]) -> tuple[IPAddress, ...]:
    return tuple(ipaddress.ip_address(text) for text in texts if text)
