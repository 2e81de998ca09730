"""Log lines: one event per line, to stderr, with a stable key, a sentence and fields.

Calls are `log.info(Event.INTERFACE_GATED, interface="veth0")`: the first argument is a member of
`Event`, everything else is a field. `time`, `level`, `event` and `message` are not names of fields.
"""

import contextlib
import enum
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO, cast


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """In the block, `import name` fails as if it were not installed.

    By None in sys.modules (docs.python.org/3/reference/import.html#the-module-cache).
    """
    loaded = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if loaded is not None:
            sys.modules[name] = loaded


# Where rich is installed, structlog imports it to format tracebacks, which podgate formats itself:
# 90 modules, a fifth of the time in which a command starts.
with _hidden("rich"):
    import structlog


class LogFormat(enum.StrEnum):
    """Log format: `json` for log collectors, `text` for people."""

    JSON = "json"
    TEXT = "text"


class LogLevel(enum.StrEnum):
    """The least severe lines that are logged."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """As the standard library's."""
        return logging.getLevelNamesMapping()[self.name]


@enum.unique
class Event(enum.Enum):
    """Every event that podgate logs. The name in lower case is its stable key; the value is the
    sentence for people. Details are fields of the line, never part of the sentence."""

    ADDRESSES_UNCONFIRMED = "Pod has addresses that are not confirmed as its own."
    ADMIN_API_NOT_SERVED = "Admin API cannot be served; commands do not reach the agent. Retrying."
    AGENT_NOT_READY = "Agent is not ready."
    AGENT_READY = "Agent holds the node and is ready."
    AGENT_STARTED = "Agent started."
    AGENT_STOPPED = "Agent stopped; gates stay attached."
    CGROUPS_NOT_WATCHED = (
        "cgroups cannot be watched; rules follow restarted services and pods up to 0.5 s later."
    )
    CERTIFICATE_LOADED = "Certificate of the webhook loaded."
    CERTIFICATE_NOT_READ = "Certificate of the webhook is not usable; using the last one."
    CERTIFICATE_RENEWED = "Certificate of the webhook made and stored."
    CHAIN_ORDER_UNKNOWN = "Program order on gated interfaces cannot be read."
    CLIENT_AFFINITY_LOST = "Service table replaced; clients may get another endpoint."
    CLUSTER_NETWORK_POLICY_CHANGED = "ClusterNetworkPolicy changed."
    CNI_PLUGIN_INSTALLED = "podgate-cni is in the CNI configuration."
    CNI_PLUGIN_NOT_INSTALLED = (
        "podgate-cni is not in the CNI configuration; new pods start without it."
    )
    CNI_SOCKET_UNAVAILABLE = (
        "Socket for podgate-cni cannot be opened; sandboxes are found when the runtime lists them."
    )
    CNI_LABELS_UNKNOWN = (
        "Labels of node and namespaces cannot be read; podgate-cni starts new pods in the default "
        "mode."
    )
    CNI_STATE_NOT_WRITTEN = (
        "podgate-cni's state file cannot be written; new pods start with the modes in it. Retrying."
    )
    CNI_STATE_TRUNCATED = (
        "podgate-cni's state file has no room for all namespaces; new pods of the others start in "
        "the default mode."
    )
    CNI_STATE_UNREADABLE = "podgate-cni's state file of a previous run cannot be read."
    COMPONENT_FAILED = "A part of the agent failed and starts again; the others continue."
    CONDITION_CHANGED = "Pod condition changed."
    CONDITION_OWNER_CONNECTED = "Owner of conditions connected."
    CONDITION_OWNER_DISCONNECTED = (
        "Owner of conditions disconnected; they stay for staleAfterSeconds."
    )
    CONDITION_OWNER_GONE = "Owner of conditions has not returned; its conditions are stale."
    CONDITION_OWNER_INVALID = "ConditionOwner is not applied as written."
    CONDITION_OWNER_REMOVED = "ConditionOwner deleted; its conditions are removed from pods."
    CONDITION_OWNERS_NOT_SAVED = (
        "ConditionOwners cannot be saved; after a restart, those of the API server are needed."
    )
    CONDITION_OWNERS_UNREADABLE = "Saved ConditionOwners cannot be read; listing them again."
    CONDITION_POD_DELETED = "Pod deleted from the API; its pending conditions are discarded."
    CONDITION_REMOVED = "Pod condition removed."
    CONDITION_RESET = "Condition of another owner is about a deleted sandbox; waiting for a report."
    CONDITION_WRITE_REJECTED = (
        "API server rejects a condition patch; check the agent's RBAC for patch pods/status."
    )
    CONDITION_WRITES_FAILING = "Conditions cannot be written; retrying with the newest of each pod."
    CONDITION_WRITES_RESUMED = "Condition writes resumed."
    CONDITIONS_API_NOT_SERVED = "Conditions API cannot be served; retrying."
    CONDITIONS_API_SERVING = "Conditions API accepts reports of this node's owners."
    CONTAINERS_STARTED_BEFORE_GATE = "Containers started before the gate was attached."
    CONTROLLER_STARTED = "Controller started."
    CONTROLLER_STOPPED = "Controller stopped."
    CREDENTIALS_RELOADED = "API credentials reloaded."
    CREDENTIALS_UNREADABLE = "API credentials cannot be reloaded; using the previous ones."
    DECLARED_PORTS_CLOSED = "Kubelet identified; gates admit only its cgroup to declared ports."
    DECLARED_PORTS_OPEN = (
        "Kubelet not identified; host processes outside pods reach the declared ports of pods in "
        "enforce and strict."
    )
    DEFAULT_DENY_GATE_NOT_ADDED = (
        "Gated interface cannot be added to the default-deny table; it stays blocked."
    )
    DEFAULT_DENY_KUBELET_NOT_SET = (
        "Kubelet cgroup cannot be set in the default-deny table; the kubelet cannot "
        "reach pods without a gate."
    )
    DEFAULT_DENY_NOT_REMOVED = "Default-deny table of a previous run cannot be removed."
    DEFAULT_DENY_NOT_UPDATED = "Default-deny table cannot be updated; retrying."
    DEFAULT_DENY_READY = (
        "Default-deny table installed; new pods are blocked until their gate is attached."
    )
    DEFAULT_DENY_TABLE_RESTORED = "Default-deny table was modified by another program; restored."
    DEFAULT_DENY_UNAVAILABLE = (
        "Default-deny table unavailable; new pods are open until their gate is attached."
    )
    DESCRIPTORS_EXHAUSTED = "No descriptors are left; those in reserve are released for gates."
    DIRECTORY_NOT_WATCHED = (
        "A directory cannot be watched, so it is read every two seconds; raise "
        "fs.inotify.max_user_instances or max_user_watches."
    )
    DROP_EVENTS_SUPPRESSED = (
        "Drop events suppressed by rate limiting; 'podgate drops' counts all of them."
    )
    EVENT_NOT_SENT = "Kubernetes Event cannot be sent."
    EXISTING_FLOWS_CLOSED = "Existing flows closed."
    EXISTING_FLOWS_NOT_CLOSABLE = (
        "Kernel lacks CONFIG_INET_DIAG_DESTROY; existing flows stay open until their "
        "processes close them."
    )
    EXISTING_FLOWS_OPEN = "Connections opened before enforcement are still open."
    EXISTING_LISTENERS_UNWATCHED = (
        "Existing listeners cannot be watched; only their restart triggers a probe."
    )
    FIRST_GATE = "First gate of this sandbox attached."
    GATE_BYPASSED = "The host reaches the pod without passing its gate."
    GATE_DETACH_FAILED = "Gate cannot be detached; retrying."
    GATE_DISPLACED = "Another program runs before the gate, or programs cannot be read."
    GATE_HAS_NO_ROOM = "Gate has no room for all addresses or rules of a pod, and drops more."
    GATE_LOST = "Gate lost; attaching it again."
    GATE_MOVED_FIRST = "Gate moved before another program on the same interface."
    GATE_NOT_SETTLED = "Gate of a crowd stays a filter for now; trying again."
    GATE_NOT_UPDATED = "Gate cannot be updated; it keeps its last addresses and rules."
    GATE_PUT_BACK = "Another program removed the gate; it was put back."
    GRACE_PERIOD_NOT_ENDED = (
        "Grace period of a gate cannot be ended; it stays open until the next pass."
    )
    GRACE_PERIOD_STARTED = "Open sockets not fully known; gate passes possible replies for 5 s."
    HANDED_OVER = "Node handed over to another agent; standing by to take it back."
    HANDOVER_REJECTED = "The other agent does not hand the node over; retrying."
    HEALTH_CHECK_NOT_SERVED = "Health check node port cannot be served; retrying."
    HOOK_NOT_ATTACHED = (
        "cgroup hook does not work; gates still drop, but processes get a timeout instead of EPERM."
    )
    HOOKS_NOT_DETACHED = "Hooks cannot be detached; retrying."
    RAW_SOCKET_CREATED = (
        "Container creates raw or packet sockets in the host's network namespace, and no policy "
        "names its cgroup."
    )
    RAW_SOCKETS_NOT_ADMITTED = (
        "Cgroups that may create raw sockets cannot be written; the last ones stay admitted."
    )
    RAW_SOCKETS_UNKNOWN = (
        "Existing raw sockets cannot be listed; their packets count as the kernel's until they "
        "are closed."
    )
    HOST_DEVICE_PUT_BACK = "Another program removed podgate's from a host device; it was put back."
    HOST_DEVICES_NOT_PROTECTED = "Host devices cannot be protected; retrying."
    HOST_EGRESS_APPLIED = "HostEgressPolicies in force."
    HOST_EGRESS_NOT_APPLIED = "HostEgressPolicies cannot be put in force; retrying."
    HOST_EGRESS_REMOVED = "Programs of HostEgressPolicies removed: no policy selects this node."
    HOST_PROBES_DENIED = (
        "Addresses that the kubelet may not connect to (--kubelet-host-probes) changed."
    )
    HOST_SOCKETS_UNREADABLE = "Host sockets cannot be listed; existing flows are not counted."
    HTTP_NOT_SERVED = "Metrics and health are not served to this machine; retrying."
    HUB_STARTED = "Hub started."
    FLOWS_NOT_WRITTEN = (
        "Records of flows cannot be written; they are queued, and counted if they are lost."
    )
    FLOWS_WRITTEN = "Records of flows are written again."
    HUB_STOPPED = "Hub stopped."
    INJECTABLE_INTERFACES_CHANGED = "Injectable interfaces changed."
    HISTORY_NOT_SAVED = "History of source processes cannot be saved."
    HISTORY_UNREADABLE = "Saved history of source processes cannot be read; it starts again."
    INTERFACE_GATED = "Gate attached to pod interface."
    INTERFACES_RELEASED = "Interfaces without a pod released from the default-deny table."
    KUBELET_FOUND = "Kubelet identified."
    KUBELET_NOT_FOLLOWED = (
        "Kernel cannot follow the kubelet's restarts without the agent; declared ports open to "
        "host processes while the agent is missing."
    )
    KUBELET_NOT_FOUND = "Kubelet not identified; retrying."
    KUBELET_POD_INVALID = "Pod from the kubelet cannot be decoded."
    KUBELET_PODS_API_CONNECTED = "Kubelet pods API connected."
    KUBELET_PODS_API_UNAVAILABLE = "Kubelet pods API unavailable; using the API server only."
    KUBELET_VERSION_UNKNOWN = (
        "Version of the kubelet cannot be read; its http probes are not recognised if it is not "
        "the expected one."
    )
    LABELS_UNKNOWN = "Node or namespace labels unknown; pods use the default mode."
    LEADERSHIP_ACQUIRED = "This replica of the controller leads."
    LEADERSHIP_LOST = "Lease lost; this replica of the controller writes nothing."
    LEASE_NOT_WRITTEN = "Lease cannot be read or written; retrying."
    LEFTOVERS_NOT_REMOVED = "Leftovers of a previous run cannot be removed; retrying."
    LISTENER_EVENTS_UNAVAILABLE = "Listener events unavailable; probes run on schedule only."
    LISTENER_LOOKUPS_UNAVAILABLE = "Listener lookups unavailable; each tcp probe connects."
    LISTENERS_NOT_WATCHED = "Listeners of a pod cannot be watched; its probes run on schedule only."
    MANIFESTS_UNREADABLE = "Manifest directory cannot be read; using the last known pods."
    METRICS_CERTIFICATE_UNREADABLE = (
        "Certificate of --metrics-address cannot be read; using the last one."
    )
    METRICS_NOT_SERVED = "Metrics are not served to other machines; retrying."
    MODES_NOT_SAVED = (
        "Mode labels cannot be saved; after a restart those that are no mode have no effect."
    )
    NETLINK_OVERRUN = "Netlink messages lost; reconciling all pods."
    NETWORK_MANAGER_CONFIGURED = "Network manager configured to ignore relay interfaces."
    NETWORK_MANAGER_NOT_CONFIGURED = (
        "Network manager cannot be configured; it may change relay interfaces."
    )
    NODE_LABEL_INVALID = "Mode label of the node is invalid."
    NODE_MODES_CHANGED = "Default mode or ceiling of the node changed."
    NODE_REPORT_NOT_WRITTEN = "Report of this node cannot be written; retrying."
    NRI_CONNECTED = "Container runtime calls podgate for each new pod (NRI)."
    NRI_DISCONNECTED = (
        "Container runtime does not call podgate for new pods (NRI), which get their gate as they "
        "do without it. Retrying."
    )
    NRI_GATE_LATE = "Pod starts by NRI before its gate is in force; the agent retries."
    NRI_SHUT_DOWN = "Container runtime ends its calls (NRI)."
    NRI_SYNCHRONIZATION_FAILED = (
        "Conditions of pods that exist cannot be corrected before the runtime's first call (NRI)."
    )
    OBJECT_INVALID = "API object cannot be decoded; using its previous version."
    OUTSIDE_NOT_PROXIED = (
        "Services are proxied for processes on this node only, without SCTP: nftables is "
        "unavailable."
    )
    OVS_DATAPATH_FOUND = (
        "Open vSwitch datapath found; packets without a socket and without the host's stamp "
        "pass gates, since it strips the origin of others."
    )
    PATCH_RESPONSE_INVALID = "Response to a condition patch cannot be decoded."
    PATH_TEST_FAILED = "Path test failed."
    PATH_TEST_NOT_SENT = "Path test packet not sent."
    PATH_TESTED = "Path test finished."
    POD_RECONCILE_FAILED = "Pod cannot be reconciled; retrying."
    POD_DROPS_INSIDE = "Rules in the pod drop connections from inside it."
    POD_REDIRECTED = "Connections from inside the pod are redirected to a proxy."
    POD_REMOVED = "Pod removed."
    POD_SETTING_REJECTED = "Setting of a pod has no effect."
    POD_VANISHED = "Pod disappeared while it was being reconciled."
    OWNED_CONDITIONS_NOT_SAVED = (
        "Conditions of other owners cannot be saved; after a restart, those in the API count."
    )
    OWNED_CONDITIONS_UNREADABLE = "Saved conditions of other owners cannot be read."
    PODINFO_CLIENTS_LIMITED = "Low file descriptor limit; PodInfo clients limited."
    PODINFO_NOT_SERVED = "PodInfo API cannot be served; retrying."
    PODINFO_SERVING = "PodInfo API serves this node's pods."
    PODS_CGROUP_FOUND = "Cgroup of pods found by a process of a pod."
    PODS_NOT_SAVED = "Pods cannot be saved."
    POLICIES_APPLIED = "Policies applied."
    POLICIES_NOT_SAVED = "Policies cannot be saved."
    POLICY_EXPIRED = "Policy expired; it admits nothing."
    POLICY_READINESS_NOT_SAVED = "Results of policy checks cannot be saved."
    POLICY_PROBLEM = "Policy not applied as written."
    POLICY_STATUS_NOT_WRITTEN = "Status of a policy cannot be written; retrying."
    PREVIOUS_RELAY_FOUND = "The relay of a previous agent still runs."
    PREVIOUS_RELAY_RELEASED = (
        "The relay of a previous agent is released; it is replaced or unneeded."
    )
    PROBE_CERTIFICATE_READ = "Client certificate of probes read."
    PROBE_CERTIFICATE_UNUSABLE = (
        "Client certificate of probes cannot be used; the probes have no result."
    )
    PROBE_CHANGED = "Probe of a running container changed."
    PROBE_NOT_ANSWERED = "Probe with answered: true cannot be answered; the relay proxies it."
    PROBE_SPEC_REJECTED = "Changed probe spec is invalid; the last valid one stays in force."
    PROXY_HTTP_NOT_SERVED = "Metrics or health of the proxy cannot be served; retrying."
    PROGRAMS_LOADED = "eBPF programs loaded."
    RELAY_ENGAGED = "Relay engaged."
    RELAY_HANDOVER_FAILED = "Relay handover failed; keeping the current relay."
    RELAY_INTERFACE_UNREADABLE = "Relay interface cannot be checked."
    RELAY_NOT_REAPED = "Killed relay process does not exit."
    RELAY_RELEASED = "Relay released; no pod is in strict."
    RELAY_STARTED = "Relay process started."
    RELAY_WAY_REPAIRED = "The way to the relay was lost; repaired."
    RELAY_WARNING = "Relay reports a problem."
    REPLY_TABLE_FAILED = (
        "Reply table cannot be filled; non-TCP replies from the host to this pod are dropped."
    )
    REPLY_TABLE_READY = "Reply table initialised from the pod's open sockets."
    RESOURCE_NOT_SERVED = "Resource not served by the API server; retrying every minute."
    RESULTS_NOT_SAVED = "Probe results cannot be saved."
    ROLL_OUT_NOT_REMINDED = "Condition of the agent's own pod cannot be written; retrying."
    ROLL_OUT_REMINDED = "The previous agent's pod still runs; reminded the DaemonSet controller."
    RULE_CGROUP_MISSING = "cgroup or unit not found; rules that name it admit nothing."
    RULE_CGROUP_RESOLVED = "cgroup found, or no longer named by a rule."
    RULE_CGROUPS_MISSING = "More cgroups named by rules not found."
    RULE_HITS_UNCOUNTED = "No room for more rule counters; hits of some rules are not counted."
    RULES_NOT_UPDATED = "Changed rules not written in time; each pod is reconciled instead."
    RUNTIME_EVENTS_UNSUPPORTED = "Container runtime has no event stream; polling."
    RUNTIME_REACHABLE = "Container runtime reachable."
    RUNTIME_UNREACHABLE = "Container runtime unreachable; using the last known sandboxes."
    RUN_DIRECTORY_UNAVAILABLE = "Run directory cannot be created; nothing is saved."
    SANDBOX_FOUND = "Sandbox found."
    SANDBOX_NETNS_MISSING = "Sandbox has no usable network namespace."
    SANDBOX_NOT_READY = "Sandbox not ready; its network namespace still exists."
    SANDBOX_REMOVED = "Sandbox removed."
    SAVED_MODES_UNREADABLE = (
        "Saved mode labels cannot be read; those that are no mode have no effect."
    )
    SAVED_PODS_RESTORED = "Saved pods restored."
    SAVED_PODS_UNREADABLE = "Saved pods cannot be read; waiting for the API server."
    SAVED_POLICIES_UNREADABLE = "Saved policies cannot be read."
    SAVED_POLICY_READINESS_UNREADABLE = (
        "Saved results of policy checks cannot be read; checking every pod again."
    )
    SAVED_RESULTS_UNREADABLE = "Saved probe results cannot be read; probing every container again."
    SAVED_SERVICES_RESTORED = "Saved services restored."
    SAVED_SERVICES_UNREADABLE = "Saved services cannot be read; waiting for the API server."
    SERVICES_APPLIED = "Services applied."
    SERVICES_LISTENING = "Service endpoints API listening."
    SERVICES_NOT_APPLIED = "Services cannot be applied; using the previous rules."
    SERVICES_RESTORED = "Another program removed rules of services; they were installed again."
    SERVICES_NOT_SAVED = "Services cannot be saved."
    SERVICES_NOT_SERVED = "Service endpoints API cannot be served; retrying."
    SERVICES_SOURCE_INVALID = (
        "Part of the services source is not usable; its last known version stays."
    )
    SERVICES_SOURCE_LOST = "Services source unavailable; using the last known services. Retrying."
    SERVICES_SOURCE_READ = "Services read from their source."
    SERVICES_STREAM_INTERRUPTED = "Service stream interrupted; using the last known services."
    SERVICES_TLS_UNUSABLE = (
        "Certificate files of service endpoints cannot be used; using the previous ones."
    )
    SOURCE_NAMES_NOT_SAVED = "Source names cannot be saved."
    SOURCE_NAMES_UNREADABLE = "Saved source names cannot be read; starting without them."
    STALE_CONNTRACK_NOT_REMOVED = (
        "Stale UDP conntrack entries cannot be removed; some datagrams go to removed endpoints."
    )
    STALE_GATE_REMOVED = "Gate of a deleted pod removed."
    STANDBY_TAKING_OVER = "The other agent stopped or hands the node over; taking over."
    STANDBY_WAITING = "Another agent is running; standing by to take over."
    STATE_WRITTEN = "State file written, which could not be written before."
    STRICT_UNAVAILABLE = "Strict unavailable; pods fall back to enforce, or their probes fail."
    SWITCHED_OFF = "podgate is off on this node: nothing is dropped any more."
    SWITCHED_ON = "podgate is on again on this node."
    TASK_WITHOUT_DESCRIPTOR = "No file descriptor is left for a task; starting the task again."
    TUNNEL_PORTS_PROTECTED = "Tunnel ports protected."
    UNKNOWN_PROGRAMS_DETACHED = "Programs of other versions, which this one lacks, detached."
    WATCH_INTERRUPTED = "Watch interrupted; using the last known objects."
    WATCH_RESUMED = "Watch resumed."
    WEBHOOK_LISTENING = "Admission webhook listening."

    @property
    def key(self) -> str:
        """As in the field `event` of a line: `interface_gated`."""
        return self.name.lower()

    @property
    def message(self) -> str:
        return self.value


def add_message(
    _logger: object, _method: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Put time, level, key and sentence first. Lines of libraries have the key `library`."""
    event = fields.pop("event")
    head = {name: fields.pop(name) for name in ("time", "level") if name in fields}
    if isinstance(event, Event):
        return {**head, "event": event.key, "message": event.message, **fields}
    return {**head, "event": "library", "message": str(event), **fields}


def configure(log_format: LogFormat, level: LogLevel = LogLevel.INFO) -> None:
    """Set up structlog, and send the standard library's warnings through it."""
    renderer = _renderer(log_format)
    stream = _LossyStream(sys.stderr)
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, add_message, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level.number),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, stream)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                add_message,
                renderer,
            ],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, level.number))


class _LossyStream(io.TextIOBase):
    """A stream that loses what cannot be written: a full disk, or a reader that has ended, must not
    end the component that logs, nor the supervisor that reports its failure. A closed stream raises
    `ValueError`, which the interpreter reports at the end since Python 3.13."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def _renderer(log_format: LogFormat) -> structlog.typing.Processor:
    if log_format is LogFormat.JSON:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
        event_key="message",
        timestamp_key="time",
        sort_keys=False,
    )
