"""Sandbox and container models, validated when decoded from CRI responses."""

import datetime
import enum
import ipaddress
from collections.abc import Iterable

import msgspec

from agent.cri import containerd_pb2, runtime_pb2
from bpf.abi import IPAddress
from probes.netns import Netns

_NANOSECONDS = 1_000_000_000
_STORED_SANDBOX = "io.cri-containerd.sandbox.metadata"


class CriContainerState(enum.Enum):
    """The CRI's container states, without their prefix."""

    CREATED = "created"
    RUNNING = "running"
    EXITED = "exited"
    UNKNOWN = "unknown"


class CriContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One container of a sandbox. A restarted container has a new id."""

    id: str
    sandbox_id: str
    name: str
    attempt: int
    state: CriContainerState
    created: datetime.datetime | None
    started: datetime.datetime | None = None
    """When its process started; None: not yet."""


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox of a pod: the CRI's term for its namespaces."""

    id: str
    pod_uid: str
    """As the kubelet passed it to the runtime; for a static pod it is the one in its mirror's
    `kubernetes.io/config.mirror` annotation."""
    pod_name: str
    pod_namespace: str
    attempt: int
    """Counts a pod's sandboxes from 0."""
    created: datetime.datetime | None
    runtime_handler: str = ""
    """The RuntimeClass' handler, such as "kata"; empty: the default."""
    is_ready: bool
    """False for a sandbox that the runtime has stopped but whose namespace still exists."""
    host_network: bool = False
    ips: tuple[IPAddress, ...] = ()
    """The pod's addresses as the runtime reports them, the primary one first."""
    netns: Netns | None = None
    """Its network namespace, if found and verified to have these addresses."""
    problem: str = ""
    """Why it has no namespace, in one sentence; else empty."""

    @property
    def short_id(self) -> str:
        """As the runtimes' commands print it."""
        return self.id[:12]

    @property
    def full_name(self) -> str:
        """ "namespace/name" of its pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    @property
    def has_netns(self) -> bool:
        """Whether its namespace is found and exists. Calls stat()."""
        return self.netns is not None and self.netns.exists()

    @property
    def age_order(self) -> tuple[int, float]:
        """Sort key: greater for a later sandbox of the pod."""
        return self.attempt, self.created.timestamp() if self.created else 0.0


class SandboxDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a sandbox that a list does not contain."""

    host_network: bool
    ips: tuple[IPAddress, ...]
    info: dict[str, str]
    """Runtime-specific JSON, by runtime-specific keys."""


class NetworkedSandbox(msgspec.Struct, frozen=True):
    """A sandbox with network, and the path of its namespace, before the runtime lists it."""

    sandbox: Sandbox
    netns_path: str


class _SandboxName(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""


class _SandboxConfig(msgspec.Struct):
    metadata: _SandboxName


class _StoredSandbox(msgspec.Struct, rename="pascal"):
    """What containerd's CRI plugin stores of a sandbox."""

    config: _SandboxConfig
    id: str = msgspec.field(name="ID")
    netns_path: str = msgspec.field(name="NetNSPath", default="")
    ip: str = msgspec.field(name="IP", default="")
    additional_ips: list[str] | None = msgspec.field(name="AdditionalIPs", default=None)


class _Stored(msgspec.Struct, rename="pascal"):
    metadata: _StoredSandbox


def decode_sandboxes(response: runtime_pb2.ListPodSandboxResponse) -> list[Sandbox]:
    """The fields that a list contains. Sandboxes without a pod's UID are not Kubernetes'."""
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
        for item in response.items
        if item.id and item.metadata.uid
    ]


def decode_details(response: runtime_pb2.PodSandboxStatusResponse) -> SandboxDetails:
    """Invalid addresses are left out."""
    status = response.status
    network = status.network
    return SandboxDetails(
        host_network=status.linux.namespaces.options.network == runtime_pb2.NODE,
        ips=addresses_of([network.ip, *(more.ip for more in network.additional_ips)]),
        info=dict(response.info),
    )


def decode_networked(response: containerd_pb2.GetContainerResponse) -> NetworkedSandbox | None:
    """None for a container that is no sandbox, or a sandbox without network, or not yet."""
    extension = response.container.extensions.get(_STORED_SANDBOX)
    if extension is None:
        return None
    try:
        stored = msgspec.json.decode(extension.value, type=_Stored).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Its content is up to containerd.
        return None
    name = stored.config.metadata
    ips = addresses_of([stored.ip, *(stored.additional_ips or ())])
    if not (ips and stored.netns_path and name.uid):
        return None
    sandbox = Sandbox(
        id=stored.id,
        pod_uid=name.uid,
        pod_name=name.name,
        pod_namespace=name.namespace,
        attempt=0,
        created=None,
        is_ready=False,
        ips=ips,
    )
    return NetworkedSandbox(sandbox, stored.netns_path)


def decode_containers(response: runtime_pb2.ListContainersResponse) -> list[CriContainer]:
    """The fields that a list contains, which has no start times."""
    return [
        CriContainer(
            id=item.id,
            sandbox_id=item.pod_sandbox_id,
            name=item.metadata.name,
            attempt=item.metadata.attempt,
            state=_state(item.state),
            created=_time(item.created_at),
        )
        for item in response.containers
        if item.id and item.pod_sandbox_id
    ]


def decode_started(response: runtime_pb2.ContainerStatusResponse) -> datetime.datetime | None:
    """When the container's process started."""
    return _time(response.status.started_at)


def _state(state: runtime_pb2.ContainerState) -> CriContainerState:
    """A state of a later CRI version is UNKNOWN."""
    return {
        runtime_pb2.CONTAINER_CREATED: CriContainerState.CREATED,
        runtime_pb2.CONTAINER_RUNNING: CriContainerState.RUNNING,
        runtime_pb2.CONTAINER_EXITED: CriContainerState.EXITED,
    }.get(state, CriContainerState.UNKNOWN)


def _time(nanoseconds: int) -> datetime.datetime | None:
    """None for 0, the CRI's "not yet", and for less. The largest int64 is a time in 2262."""
    if nanoseconds <= 0:
        return None
    return datetime.datetime.fromtimestamp(nanoseconds / _NANOSECONDS, datetime.UTC)


def addresses_of(texts: Iterable[str]) -> tuple[IPAddress, ...]:
    """Those that are addresses."""
    found: list[IPAddress] = []
    for text in texts:
        try:
            found.append(ipaddress.ip_address(text))
        except ValueError:
            continue
    return tuple(found)
