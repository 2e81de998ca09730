"""Kinds of findings of the node and its agent."""

from agent.admin.finding_kinds.kind import BROKEN, DEGRADED, NOTE, OPEN, define

DECLARED_PORTS_OPEN = define(
    "declared-ports-open",
    OPEN,
    "The kubelet is not identified, so host processes reach the ports of probes and hooks.",
    "Name the kubelet: --kubelet=process:NAME, unit:kubelet.service or cgroup:/path.",
    "podgate doctor",
)
KUBELET_UNKNOWN = define(
    "kubelet-unknown",
    DEGRADED,
    "The kubelet is not identified; no declared port is open because of it yet.",
    DECLARED_PORTS_OPEN.remedy,
    "podgate doctor",
)
KUBELET_NOT_FOLLOWED = define(
    "kubelet-not-followed",
    DEGRADED,
    "Without the agent, the kernel does not follow the kubelet's restarts.",
    "Keep the agent running: it follows them itself.",
)
OFF = define(
    "off",
    OPEN,
    "A ceiling of off, or 'podgate off', switches podgate off on this node.",
    "Remove what sets the ceiling: 'podgate on --node', or 'kubectl podgate on'.",
)
PODS_NOT_SYNCED = define(
    "pods-not-synced",
    DEGRADED,
    "The agent has not read all pods of the node.",
    "Retry; if it stays, see the agent's log.",
)
WATCH_BROKEN = define(
    "watch-broken",
    DEGRADED,
    "A resource of the API server cannot be watched; what was last read stays in force.",
    "Restore the API server, the right or the definition that the sentence names.",
    "podgate doctor",
)
CONDITIONS_NOT_WRITTEN = define(
    "conditions-not-written",
    BROKEN,
    "The API server rejects conditions of pods, or has not received them for half a minute.",
    "Restore the API server, or the right to patch pods/status.",
    "podgate doctor",
)
CONDITION_OWNER_GONE = define(
    "condition-owner-gone",
    BROKEN,
    "The owner of conditions has been gone for longer than its ConditionOwner admits, and pods "
    "have a readiness gate of its domain that is not True.",
    "Start the agent that the ConditionOwner names, on this node; it finds its conditions there.",
    "podgate status",
)
CONDITION_OWNER_INVALID = define(
    "condition-owner-invalid",
    DEGRADED,
    "A ConditionOwner, or its source, is not applied as written.",
    "Correct the ConditionOwner that the sentence names.",
)
RUNTIME_UNREACHABLE = define(
    "runtime-unreachable",
    DEGRADED,
    "The container runtime does not respond; pods stay as they were last known.",
    "Restore the runtime, or name its socket with --cri-socket.",
    "podgate doctor",
)
KUBELET_UNREACHABLE = define(
    "kubelet-unreachable",
    DEGRADED,
    "The pods API of a kubelet without an API server does not respond: pods stay as they were last "
    "known, and new ones have the node's mode, and the kubelet reaches all of their ports.",
    "Start the kubelet, or enable its feature gate PodsAPI.",
    "podgate doctor",
)
SERVICES_OLD = define(
    "services-old",
    DEGRADED,
    "A source of service endpoints does not respond, or does not confirm the saved ones.",
    "Restore the source that the sentence names.",
)
POLICY_NOT_APPLIED = define(
    "policy-not-applied",
    DEGRADED,
    "A HostAccessPolicy, or a source of policies, is not applied as written.",
    "Correct the policy that the sentence names.",
    "podgate rules",
)
CLUSTER_NETWORK_POLICY_NOT_UNDERSTOOD = define(
    "cluster-network-policy-not-understood",
    DEGRADED,
    "A ClusterNetworkPolicy has a field or value that this version does not know: podgate does not "
    "evaluate it.",
    "Upgrade podgate if the object is of a later version of the API; else correct it.",
    "kubectl get clusternetworkpolicies",
)
POLICY_WITHOUT_EFFECT = define(
    "policy-without-effect",
    DEGRADED,
    "A HostAccessPolicy selects no pod, or one of its rules has found no source or port.",
    "Correct the names and labels that the policy selects; 'podgate rules' shows each rule.",
    "podgate rules",
)
HOOK_MISSING = define(
    "hook-missing",
    DEGRADED,
    "A hook at the root cgroup does not work. Gates drop without it, after a timeout instead of "
    "EPERM; only hairpins need hook_sockops (docs/kernels.md).",
    "Solve the reason in the sentence; without an agent, start it.",
    "podgate doctor",
)
RAW_SOCKETS_NOT_DENIED = define(
    "raw-sockets-not-denied",
    OPEN,
    "--raw-sockets=deny-pods is set, and raw or packet sockets of containers are not rejected.",
    "See docs/security.md, raw sockets; give no container CAP_NET_RAW on the host network.",
    "podgate drops",
)
HOST_PROBES_NOT_DENIED = define(
    "host-probes-not-denied",
    DEGRADED,
    "--kubelet-host-probes=deny is set, and the kubelet connects to hosts that probes name.",
    "Solve the reason in the sentence.",
    "podgate doctor",
)
HOST_EGRESS_NOT_IN_FORCE = define(
    "host-egress-not-in-force",
    DEGRADED,
    "A HostEgressPolicy is not in force on this node as written: a subject is not found, or the "
    "kernel rejects what it needs.",
    "Correct the policy, or solve the reason in the sentence.",
    "podgate rules",
)
GUARD_DENIED = define(
    "guard-denied",
    NOTE,
    "A guard has rejected sockets of containers, or connections of the kubelet's probes.",
    "Nothing has to be done, unless a program needs them: then admit it, or correct the probe.",
    "podgate drops",
)
PODS_CGROUP_MISSING = define(
    "pods-cgroup-missing",
    DEGRADED,
    "The cgroup of the node's pods is not found, so processes of pods on the host network count "
    "as the host's, and --raw-sockets=deny-pods rejects none.",
    "Run the kubelet and its containers in cgroups of version 2, in directories that root owns.",
    "podgate doctor",
)
DEFAULT_DENY_MISSING = define(
    "default-deny-missing",
    OPEN,
    "The nftables table that blocks new pods is not installed: they are open until their gate is "
    "attached.",
    "Install nftables, and see the agent's log for the error.",
    "podgate doctor",
)
CNI_PLUGIN_MISSING = define(
    "cni-plugin-missing",
    DEGRADED,
    "podgate-cni is not in the node's CNI configuration, so the agent gates new pods after they "
    "start.",
    "See the agent's log for what prevents the installation.",
    "podgate cni status",
)
NRI_NOT_CONNECTED = define(
    "nri-not-connected",
    DEGRADED,
    "The container runtime has NRI and does not call the agent for new pods, so these get their "
    "gate as they do without NRI: some milliseconds after their network exists.",
    "Solve the reason in the sentence; the agent retries.",
    "podgate doctor",
)
KUBELET_API_MISSING = define(
    "kubelet-api-missing",
    NOTE,
    "The kubelet's pods API does not respond, so pods come from the API server alone.",
    "Nothing has to be done; a kubelet with the feature gate PodsAPI has it.",
)
COMPONENT_FAILING = define(
    "component-failing",
    DEGRADED,
    "A part of the agent fails, and starts again by itself; it has not run for a minute since.",
    "Solve the reason in the sentence; if it stays, report it with 'podgate bugtool'.",
)
PORT_NOT_OPEN = define(
    "port-not-open",
    DEGRADED,
    "A port of the agent cannot be opened, so metrics and health, or metrics for other machines, "
    "are not served.",
    "End the process that has the port, or choose another address with the option that the "
    "sentence names; the agent retries.",
)
STATE_NOT_WRITTEN = define(
    "state-not-written",
    DEGRADED,
    "State files of the agent cannot be written, so the next agent starts with older ones.",
    "Make room in the run directory, or make it writable; the agent retries.",
)
FLOWS_NOT_WRITTEN = define(
    "flows-not-written",
    DEGRADED,
    "Records of flows have not been written for a minute; those that the queue has no room for are "
    "lost, and counted.",
    "Make room for the file of --flows-file, or make it writable; start the receiver of "
    "--flows-otlp, or correct its URL, headers or certificates. The agent retries.",
)
RELAY_MISSING = define(
    "relay-missing",
    DEGRADED,
    "Pods are in strict and no relay serves; their gates admit the kubelet as in enforce.",
    "Solve the reason; 'podgate relay restart' starts the relay again.",
    "podgate doctor",
)
RELAY_MISSING_PROBES_FAIL = define(
    "relay-missing-probes-fail",
    BROKEN,
    "Pods are in strict, no relay serves, and --strict-without-fallback is set: probes fail.",
    RELAY_MISSING.remedy,
    "podgate doctor",
)
RELAY_FULL = define(
    "relay-full",
    DEGRADED,
    "The relay is full: new connections of the kubelet go directly to the gate.",
    "Find out what opens the connections: 'podgate status' counts them.",
    "podgate status",
)

# Of an agent that does not respond, by the pins.

AGENT_DEAD = define(
    "agent-dead",
    BROKEN,
    "No agent responds and gates are in force: conditions and rules do not follow pods.",
    "Start the agent; its log has the reason why it ended.",
    "podgate status",
)
AGENT_MISSING = define(
    "agent-missing",
    DEGRADED,
    "No agent responds, and no gate is in force.",
    AGENT_DEAD.remedy,
)
AGENT_HUNG = define(
    "agent-hung",
    BROKEN,
    "The agent's process runs, and neither answers nor beats: conditions and rules do not follow "
    "pods.",
    "It ends by itself after --watchdog-seconds and is started again; otherwise end it.",
    "podgate bugtool",
)
AGENT_STARTING = define(
    "agent-starting",
    DEGRADED,
    "The agent has started within the last minute and does not answer yet.",
    "Wait; if it stays, see the agent's log.",
)
AGENT_UNREADABLE = define(
    "agent-unreadable",
    DEGRADED,
    "The agent's answer cannot be read: it is of another version, or it fails.",
    "Use the agent's own podgate command, or upgrade so that both have one version.",
)
GATES_OPEN = define(
    "gates-open",
    OPEN,
    "No agent has run for --dead-man-hours, so all gates are open.",
    "Start the agent.",
)
GATES_OPEN_SOON = define(
    "gates-open-soon",
    DEGRADED,
    "No agent runs, so all gates open after --dead-man-hours.",
    "Start the agent.",
)
PORTS_OPEN_SOON = define(
    "declared-ports-open-soon",
    DEGRADED,
    "No agent runs and the kernel does not follow the kubelet, so declared ports open soon.",
    "Start the agent.",
)
GATE_DETACHED = define(
    "gate-detached",
    OPEN,
    "A gate is configured and no program is attached to its interface: everything passes.",
    "Start the agent, which attaches it again; if one runs, see its log.",
    "podgate doctor",
)
