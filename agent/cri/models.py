"""Sandboxes and containers as podgate knows them: a runtime's answers, checked at the edge."""

import datetime
import enum
import ipaddress
from collections.abc import Iterable

import msgspec

from agent.cri import runtime_pb2
from bpf.abi import IPAddress
from probes.netns import Netns

_NANOSECONDS = 1_000_000_000


class CriContainerState(enum.Enum):
    """The CRI's, without its prefix."""

    CREATED = "created"
    RUNNING = "running"
    EXITED = "exited"
    UNKNOWN = "unknown"


class CriContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One container of a sandbox. A restarted one has another id."""

    id: str
    sandbox_id: str
    name: str
    attempt: int
    state: CriContainerState
    created: datetime.datetime | None
    started: datetime.datetime | None = None
    """When its process started; None before that."""


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox of a pod: its namespaces, in the CRI's word."""

    id: str
    pod_uid: str
    """As the kubelet gave it to the runtime: of a static pod the one in its mirror's
    `kubernetes.io/config.mirror` annotation."""
    pod_name: str
    pod_namespace: str
    attempt: int
    """Counts a pod's sandboxes from 0."""
    created: datetime.datetime | None
    runtime_handler: str = ""
    """The RuntimeClass' handler, such as "kata"; "" is the default one."""
    is_ready: bool
    """False where the runtime has given it up but its namespace still stands."""
    host_network: bool = False
    ips: tuple[IPAddress, ...] = ()
    """What the runtime calls the pod's addresses; the primary one first."""
    netns: Netns | None = None
    """Its network namespace, if it was found and really has these addresses."""
    problem: str = ""
    """One sentence why there is no namespace, or nothing."""

    @property
    def full_name(self) -> str:
        """ "namespace/name" of its pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    @property
    def age_order(self) -> tuple[int, float]:
        """Greater for the later of a pod's sandboxes."""
        return self.attempt, self.created.timestamp() if self.created else 0.0


class SandboxDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a list does not tell of a sandbox."""

    host_network: bool
    ips: tuple[IPAddress, ...]
    info: dict[str, str]
    """JSON of the runtime's own, by keys of its own."""


def decode_sandboxes(answer: runtime_pb2.ListPodSandboxResponse) -> list[Sandbox]:
    """As far as a list tells. Those without a pod's UID are somebody else's and left out."""
    return [
        Sandbox(
            id=item.id,
            pod_uid=item.metadata.uid,
            pod_name=item.metadata.name,
            pod_namespace=item.metadata.namespace,
            attempt=item.metadata.attempt,
            created=_time(item.created_at),
            runtime_handler=item.runtime_handler,
            is_ready=item.state == runtime_pb2.SANDBOX_READY,
        )
        for item in answer.items
        if item.id and item.metadata.uid
    ]


def decode_details(answer: runtime_pb2.PodSandboxStatusResponse) -> SandboxDetails:
    """Addresses that are none are left out."""
    status = answer.status
    network = status.network
    return SandboxDetails(
        host_network=status.linux.namespaces.options.network == runtime_pb2.NODE,
        ips=_addresses([network.ip, *(more.ip for more in network.additional_ips)]),
        info=dict(answer.info),
    )


def decode_containers(answer: runtime_pb2.ListContainersResponse) -> list[CriContainer]:
    """As far as a list tells: when they started, it does not."""
    return [
        CriContainer(
            id=item.id,
            sandbox_id=item.pod_sandbox_id,
            name=item.metadata.name,
            attempt=item.metadata.attempt,
            state=_state(item.state),
            created=_time(item.created_at),
        )
        for item in answer.containers
        if item.id and item.pod_sandbox_id
    ]


def decode_started(answer: runtime_pb2.ContainerStatusResponse) -> datetime.datetime | None:
    """When the container's process started."""
    return _time(answer.status.started_at)


def _state(state: runtime_pb2.ContainerState) -> CriContainerState:
    """A state that a later CRI invents is unknown."""
    return {
        runtime_pb2.CONTAINER_CREATED: CriContainerState.CREATED,
        runtime_pb2.CONTAINER_RUNNING: CriContainerState.RUNNING,
        runtime_pb2.CONTAINER_EXITED: CriContainerState.EXITED,
    }.get(state, CriContainerState.UNKNOWN)


def _time(nanoseconds: int) -> datetime.datetime | None:
    """None for 0, the CRI's "not yet", and for what no clock says."""
    if nanoseconds <= 0:
        return None
    try:
        return datetime.datetime.fromtimestamp(nanoseconds / _NANOSECONDS, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _addresses(texts: Iterable[str]) -> tuple[IPAddress, ...]:
    found: list[IPAddress] = []
    for text in texts:
        try:
            found.append(ipaddress.ip_address(text))
        except ValueError:
            continue
    return tuple(found)
