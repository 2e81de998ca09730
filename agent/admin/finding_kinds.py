"""The kinds of findings: how bad each is, what it means and what to do. No I/O.

docs/reference/findings.md is made from this list. It needs only the standard library, since the
kubectl plugin has it, too.
"""

import dataclasses
import enum


class Severity(enum.StrEnum):
    """How bad a finding is; the worst first."""

    OPEN = "open"
    """Host processes reach a pod, or a port of it, that should be closed."""
    BROKEN = "broken"
    """Probes, conditions or traffic of a user fail."""
    DEGRADED = "degraded"
    """podgate works with less than is configured, or an operator must act."""
    NOTE = "note"
    """Nothing has to be done now."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return _RANKS[self]

    @classmethod
    def of(cls, text: str) -> "Severity":
        """The severity of that name; of a name from a later version, DEGRADED."""
        return cls(text) if text in _RANKS else cls.DEGRADED


_RANKS = {severity: rank for rank, severity in enumerate(Severity)}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One kind. meaning: when it is found, a sentence; remedy: what to do, a sentence; command: to
    run next, or empty; {name} is the subject's name, of a pod also {namespace} and {pod}."""

    name: str
    severity: Severity
    meaning: str
    remedy: str
    command: str = ""

    @property
    def reason(self) -> str:
        """The reason of Events, in CamelCase."""
        return "".join(word.capitalize() for word in self.name.split("-"))


KINDS: dict[str, Kind] = {}
"""All kinds, by name."""


def _kind(name: str, severity: Severity, meaning: str, remedy: str, command: str = "") -> Kind:
    KINDS[name] = Kind(name, severity, meaning, remedy, command)
    return KINDS[name]


_OPEN, _BROKEN, _DEGRADED, _NOTE = Severity

_POD = "podgate explain pod {name}"
_EVENTS = "kubectl describe pod -n {namespace} {pod}"
_APPLY = "Apply this version's manifests again ('kubectl apply -k deploy/manifests')."

# Of the agent and the node.

DECLARED_PORTS_OPEN = _kind(
    "declared-ports-open",
    _OPEN,
    "The kubelet is not identified, so host processes reach the ports of probes and hooks.",
    "Name the kubelet: --kubelet=process:NAME, unit:kubelet.service or cgroup:/path.",
    "podgate doctor",
)
KUBELET_UNKNOWN = _kind(
    "kubelet-unknown",
    _DEGRADED,
    "The kubelet is not identified; no declared port is open because of it yet.",
    DECLARED_PORTS_OPEN.remedy,
    "podgate doctor",
)
KUBELET_NOT_FOLLOWED = _kind(
    "kubelet-not-followed",
    _DEGRADED,
    "Without the agent, the kernel does not follow the kubelet's restarts.",
    "Keep the agent running: it follows them itself.",
)
OFF = _kind(
    "off",
    _OPEN,
    "A ceiling of off, or 'podgate off', switches podgate off on this node.",
    "Remove what sets the ceiling: 'podgate on --node', or 'kubectl podgate on'.",
)
PODS_NOT_SYNCED = _kind(
    "pods-not-synced",
    _DEGRADED,
    "The agent has not read all pods of the node.",
    "Retry; if it stays, see the agent's log.",
)
WATCH_BROKEN = _kind(
    "watch-broken",
    _DEGRADED,
    "A resource of the API server cannot be watched; what was last read stays in force.",
    "Restore the API server, the right or the definition that the sentence names.",
    "podgate doctor",
)
CONDITIONS_NOT_WRITTEN = _kind(
    "conditions-not-written",
    _BROKEN,
    "The API server rejects conditions of pods, or has not received them for half a minute.",
    "Restore the API server, or the right to patch pods/status.",
    "podgate doctor",
)
RUNTIME_UNREACHABLE = _kind(
    "runtime-unreachable",
    _DEGRADED,
    "The container runtime does not respond; pods stay as they were last known.",
    "Restore the runtime, or name its socket with --cri-socket.",
    "podgate doctor",
)
SERVICES_OLD = _kind(
    "services-old",
    _DEGRADED,
    "A source of service endpoints does not respond, or does not confirm the saved ones.",
    "Restore the source that the sentence names.",
)
POLICY_NOT_APPLIED = _kind(
    "policy-not-applied",
    _DEGRADED,
    "A HostAccessPolicy, or a source of policies, is not applied as written.",
    "Correct the policy that the sentence names.",
    "podgate rules",
)
HOOK_MISSING = _kind(
    "hook-missing",
    _DEGRADED,
    "A hook at the root cgroup does not work. Gates drop without it, after a timeout instead of "
    "EPERM.",
    "Solve the reason in the sentence; without an agent, start it.",
    "podgate doctor",
)
RAW_SOCKETS_NOT_DENIED = _kind(
    "raw-sockets-not-denied",
    _OPEN,
    "--raw-sockets=deny-pods is set, and raw or packet sockets of containers are not rejected.",
    "See docs/security.md, raw sockets; give no container CAP_NET_RAW on the host network.",
    "podgate drops",
)
DEFAULT_DENY_MISSING = _kind(
    "default-deny-missing",
    _OPEN,
    "The nftables table that blocks new pods is not installed: they are open until their gate is "
    "attached.",
    "Install nftables, and see the agent's log for the error.",
    "podgate doctor",
)
CNI_PLUGIN_MISSING = _kind(
    "cni-plugin-missing",
    _DEGRADED,
    "podgate-cni is not in the node's CNI configuration, so the agent gates new pods after they "
    "start.",
    "See the agent's log for what prevents the installation.",
    "podgate cni status",
)
KUBELET_API_MISSING = _kind(
    "kubelet-api-missing",
    _NOTE,
    "The kubelet's pods API does not respond, so pods come from the API server alone.",
    "Nothing has to be done; a kubelet with the feature gate PodsAPI has it.",
)
COMPONENT_FAILING = _kind(
    "component-failing",
    _DEGRADED,
    "A part of the agent fails, and starts again by itself; it has not run for a minute since.",
    "Solve the reason in the sentence; if it stays, report it with 'podgate bugtool'.",
)
PORT_NOT_OPEN = _kind(
    "port-not-open",
    _DEGRADED,
    "A port of the agent cannot be opened, so metrics and health, or metrics for other machines, "
    "are not served.",
    "End the process that has the port, or choose another address with the option that the "
    "sentence names; the agent retries.",
)
STATE_NOT_WRITTEN = _kind(
    "state-not-written",
    _DEGRADED,
    "State files of the agent cannot be written, so the next agent starts with older ones.",
    "Make room in the run directory, or make it writable; the agent retries.",
)
RELAY_MISSING = _kind(
    "relay-missing",
    _DEGRADED,
    "Pods are in strict and no relay serves; their gates admit the kubelet as in enforce.",
    "Solve the reason; 'podgate relay restart' starts the relay again.",
    "podgate doctor",
)
RELAY_MISSING_PROBES_FAIL = _kind(
    "relay-missing-probes-fail",
    _BROKEN,
    "Pods are in strict, no relay serves, and --strict-without-fallback is set: probes fail.",
    RELAY_MISSING.remedy,
    "podgate doctor",
)
RELAY_FULL = _kind(
    "relay-full",
    _DEGRADED,
    "The relay is full: new connections of the kubelet go directly to the gate.",
    "Find out what opens the connections: 'podgate status' counts them.",
    "podgate status",
)

# Of an agent that does not respond, by the pins.

AGENT_DEAD = _kind(
    "agent-dead",
    _BROKEN,
    "No agent responds and gates are in force: conditions and rules do not follow pods.",
    "Start the agent; its log has the reason why it ended.",
    "podgate status",
)
AGENT_MISSING = _kind(
    "agent-missing",
    _DEGRADED,
    "No agent responds, and no gate is in force.",
    AGENT_DEAD.remedy,
)
AGENT_UNREADABLE = _kind(
    "agent-unreadable",
    _DEGRADED,
    "The agent's answer cannot be read: it is of another version, or it fails.",
    "Use the agent's own podgate command, or upgrade so that both have one version.",
)
GATES_OPEN = _kind(
    "gates-open",
    _OPEN,
    "No agent has run for --dead-man-hours, so all gates are open.",
    "Start the agent.",
)
GATES_OPEN_SOON = _kind(
    "gates-open-soon",
    _DEGRADED,
    "No agent runs, so all gates open after --dead-man-hours.",
    "Start the agent.",
)
PORTS_OPEN_SOON = _kind(
    "declared-ports-open-soon",
    _DEGRADED,
    "No agent runs and the kernel does not follow the kubelet, so declared ports open soon.",
    "Start the agent.",
)
GATE_DETACHED = _kind(
    "gate-detached",
    _OPEN,
    "A gate is configured and no program is attached to its interface: everything passes.",
    "Start the agent, which attaches it again; if one runs, see its log.",
    "podgate doctor",
)

# Of pods.

GATE_BYPASSED = _kind(
    "gate-bypassed",
    _OPEN,
    "The path test reaches the pod without passing its gate.",
    "Check how the CNI routes from the node to the pod; until then use audit.",
    _POD,
)
GATE_FAILED = _kind(
    "gate-failed",
    _OPEN,
    "The pod's gate cannot be attached, or was lost.",
    "Solve the reason in the sentence.",
    "podgate doctor",
)
GATE_NOT_UPDATED = _kind(
    "gate-not-updated",
    _DEGRADED,
    "The pod's gate keeps its last addresses and rules, or has no room for more.",
    "Solve the reason in the sentence, or use fewer rules or addresses.",
    "podgate doctor",
)
NETNS_UNUSABLE = _kind(
    "netns-unusable",
    _OPEN,
    "The pod has no gate, since the named network namespace is missing, invalid or another's.",
    "Name the pod's own network namespace in the manifest's annotation podgate.io/netns.",
    _POD,
)
NOT_SUPPORTED = _kind(
    "interface-not-supported",
    _OPEN,
    "The pod should be enforced, and has an interface to which no gate can be attached.",
    "Configure the network plugin to use veth pairs.",
    _POD,
)
POD_STARTING = _kind(
    "pod-starting",
    _NOTE,
    "The pod has no sandbox, network namespace, interface or probe result yet.",
    "Wait; if it stays, see the pod's Events.",
    _EVENTS,
)
MANIFEST_INVALID = _kind(
    "manifest-invalid",
    _DEGRADED,
    "The pod, its manifest or an annotation cannot be read; the last valid one stays in force.",
    "Correct it.",
    _EVENTS,
)
ANNOTATION_IGNORED = _kind(
    "annotation-ignored",
    _DEGRADED,
    "An annotation of the pod has no effect.",
    "Correct it, or remove it.",
)
PROBE_HOST = _kind(
    "probe-host-not-allowed",
    _DEGRADED,
    "A probe or hook names a host, so the kubelet connects there and not to the pod.",
    "Remove host from the pod's probe or hook.",
    _EVENTS,
)
PROBE_FAILING = _kind(
    "probe-failing",
    _DEGRADED,
    "A probe of the pod fails.",
    "Repair what the probe checks; 'podgate probe' shows each step of it.",
    "podgate probe --pod {name}",
)
PROBE_REDIRECTED = _kind(
    "probe-redirected",
    _DEGRADED,
    "Rules in the pod redirect podgate's probes to another process, such as a mesh's proxy.",
    "Have the rules exempt the loopback interface, or a user other than root; else leave these "
    "probes to the kubelet.",
    _POD,
)
PROBE_NOT_ANSWERED = _kind(
    "probe-not-answered",
    _DEGRADED,
    "podgate is to answer a probe for the kubelet, and cannot.",
    "Solve the reason in the sentence, or remove the pod's annotation.",
    _POD,
)
STRICT_UNAVAILABLE = _kind(
    "strict-unavailable",
    _DEGRADED,
    "The pod is in strict, and the relay does not proxy to it.",
    "Solve the reason in the sentence, or set mode enforce.",
    _POD,
)
EXISTING_FLOWS = _kind(
    "existing-flows",
    _DEGRADED,
    "Flows that the host opened to the pod before enforcement are still open.",
    "--close-existing-flows closes such flows.",
)
ADDRESS_UNCONFIRMED = _kind(
    "address-unconfirmed",
    _DEGRADED,
    "The pod has addresses that neither the runtime nor the node's routes confirm as its own.",
    "Find out why the pod has them; see docs/security.md.",
    _POD,
)
PATH_TEST_FAILED = _kind(
    "path-test-failed",
    _DEGRADED,
    "It could not be tested whether packets to the pod pass its gate.",
    "See the agent's log.",
)

# Of labels.

LABEL_IGNORED = _kind(
    "label-ignored",
    _OPEN,
    "A mode label has a value that is no mode, and pods for which it should decide are not closed.",
    "Correct the label.",
)
LABEL_INVALID = _kind(
    "label-invalid",
    _DEGRADED,
    "A label has a value that is no mode; no pod is open because of it.",
    "Correct the label.",
)
MODE_NOT_ALLOWED = _kind(
    "mode-not-allowed",
    _DEGRADED,
    "A pod's label is less strict than the namespace allows, and is ignored.",
    "Remove the label, or allow it with podgate.io/mode-override=allowed on the namespace.",
)
MODE_LIMITED = _kind(
    "mode-limited",
    _DEGRADED,
    "A ceiling of the node or of the cluster is below the mode that labels give.",
    "Raise the ceiling that the sentence names, once that is wanted.",
)
MODE_KEPT = _kind(
    "mode-kept",
    _NOTE,
    "A gate keeps a stricter mode until the labels of node and namespaces are read.",
    "Wait for the API server.",
)

# Of the machine and the cluster, by the checks of `podgate doctor`.

PRIVILEGES_MISSING = _kind(
    "privileges-missing",
    _BROKEN,
    "bpf(2) is not allowed, or cgroup v2 is not mounted.",
    "Run as root, with cgroup v2.",
)
PROGRAMS_MISSING = _kind(
    "programs-missing",
    _BROKEN,
    "No prebuilt programs fit this kernel, and none can be compiled.",
    "Use podgate's image, or install the distribution's python3-bpfcc and use a virtual "
    "environment made with --system-site-packages.",
)
TCX_MISSING = _kind(
    "tcx-missing",
    _NOTE,
    "The kernel has no tcx (Linux 6.6): gates are clsact filters.",
    "Nothing has to be done; a newer kernel has it.",
)
PROCESS_NAMES_MISSING = _kind(
    "process-names-missing",
    _NOTE,
    "The kernel reports no process names to gates (Linux 6.16).",
    "Nothing has to be done; a newer kernel has it.",
)
COOKIES_MISSING = _kind(
    "netns-cookies-missing",
    _DEGRADED,
    "The kernel has no netns cookies (Linux 5.14): no EPERM, and tunnels can bypass gates.",
    "Use a newer kernel.",
)
HOOK_TAKEN = _kind(
    "hook-taken",
    _DEGRADED,
    "Another program is attached at the root cgroup so that podgate's hook cannot be.",
    "Have its owner attach it with BPF_F_ALLOW_MULTI.",
)
KUBELET_UNFOLLOWABLE = _kind(
    "kubelet-unfollowable",
    _DEGRADED,
    "The kernel cannot follow the kubelet's restarts while no agent runs.",
    "Use a kernel with BTF and BPF trampolines (CONFIG_DEBUG_INFO_BTF).",
)
PACKET_SOCKETS_UNREJECTABLE = _kind(
    "packet-sockets-unrejectable",
    _DEGRADED,
    "The kernel cannot reject packet sockets; --raw-sockets=deny-pods only counts them.",
    "Give no container CAP_NET_RAW on the host network; 'podgate drops' lists those that use it.",
)
UNCHECKED_SOCKETS = _kind(
    "packet-sockets-unchecked",
    _DEGRADED,
    "Processes may have packet sockets from before podgate was installed.",
    "Restart these processes if you do not trust them.",
)
BPFFS_UNUSABLE = _kind(
    "bpffs-unusable",
    _BROKEN,
    "The BPF file system is missing, read-only, or has pins that do not fit.",
    "Mount a BPF file system read-write, or name another with --bpffs.",
)
OTHER_PINS = _kind(
    "other-pins",
    _DEGRADED,
    "Pins of another version exist.",
    "Start the agent: it removes them after the first sync.",
)
GATE_NOT_FIRST = _kind(
    "gate-not-first",
    _OPEN,
    "A program of others runs before a gate: packets that it accepts pass no gate.",
    "The agent moves its gate first within seconds; if this stays, have the owner attach after it.",
    "bpftool net show",
)
PROGRAMS_UNREADABLE = _kind(
    "programs-unreadable",
    _DEGRADED,
    "Programs that others attach where podgate does cannot be read.",
    "List them with 'bpftool net show' and 'bpftool cgroup tree'.",
)
BPFTOOL_MISSING = _kind(
    "bpftool-missing",
    _NOTE,
    "bpftool is not installed, so 'podgate programs' does not work.",
    "Install the distribution's package bpftool (Debian; Ubuntu: linux-tools-common), or run the "
    "command in podgate's image.",
)
NFTABLES_MISSING = _kind(
    "nftables-missing",
    _OPEN,
    "nft does not work: new pods are open until their gate is attached.",
    "Install nftables.",
)
TUN_ROUTES = _kind(
    "tun-routes",
    _DEGRADED,
    "A tun interface carries traffic of other networks: its process reaches pods past gates.",
    "Let only trusted processes open them (mode of /dev/net/tun, CAP_NET_ADMIN).",
)
RELAY_RANGES_TAKEN = _kind(
    "relay-ranges-unusable",
    _DEGRADED,
    "Strict is unavailable on this node: a range is used, or the kernel lacks something.",
    "Solve that, or choose other ranges with --relay-range4 and --relay-range6.",
)
NETWORK_UNTRIED = _kind(
    "network-untried",
    _DEGRADED,
    "The network plugin sends packets in ways that may bypass gates.",
    "Enforce only where PATH TEST in 'podgate status -o wide' is confirmed "
    "(docs/guides/networks.md).",
    "podgate status -o wide",
)
NETKIT = _kind(
    "netkit",
    _DEGRADED,
    "Pods are connected by netkit devices, which have no gate.",
    "Configure the network plugin to use veth pairs.",
)
RUNTIME_NOT_FOUND = _kind(
    "runtime-not-found",
    _BROKEN,
    "No container runtime responds.",
    "Mount the directory of the runtime's socket, or name the socket with --cri-socket.",
)
RUNTIME_NOT_READY = _kind(
    "runtime-not-ready",
    _DEGRADED,
    "The container runtime reports that it is not ready: new pods do not start.",
    "Solve the reason in the sentence.",
)
API_SERVER_UNREACHABLE = _kind(
    "api-server-unreachable",
    _BROKEN,
    "The API server does not answer.",
    "Check the route to it, and the account's token.",
)
RIGHT_MISSING = _kind(
    "right-missing",
    _BROKEN,
    "The agent's account lacks a right without which pods are not protected or not Ready.",
    _APPLY,
)
RIGHT_MISSING_FEATURE = _kind(
    "right-missing-feature",
    _DEGRADED,
    "The agent's account lacks a right of one feature, or its rights cannot be reviewed.",
    _APPLY,
)
DEFINITION_MISSING = _kind(
    "definition-missing",
    _BROKEN,
    "HostAccessPolicies or NodeReports are not defined in the cluster, or in another version.",
    _APPLY,
)
DEFINITION_OTHER = _kind(
    "definition-other",
    _DEGRADED,
    "A definition is of another version of podgate, or cannot be read.",
    _APPLY,
)
CLOCK_WRONG = _kind(
    "clock-wrong",
    _DEGRADED,
    "This node's clock differs from the API server's: times in conditions and Events are wrong.",
    "Synchronise it, for instance by chrony or systemd-timesyncd.",
)
DNS_RULE_MISSING = _kind(
    "dns-rule-missing",
    _DEGRADED,
    "The rule that admits the node to the cluster's DNS is not in force.",
    "Remove node-dns from --disable-default-rules, or write a HostAccessPolicy for it.",
)

# Of a cluster, by `kubectl podgate`.

NO_ANSWER = _kind(
    "no-answer",
    _BROKEN,
    "No agent of the node answers `kubectl podgate`.",
    "Solve the reason in the sentence; on the node, 'podgate status' works without an agent.",
)


def page() -> str:
    """docs/reference/findings.md, Markdown."""
    lines = [
        "# Findings",
        "",
        "What podgate finds wrong on a node. `podgate status`, the status page, `podgate doctor`, "
        "`podgate explain pod`, `kubectl podgate`, `/readyz`, Events and the metric "
        "`podgate_findings` name each by its kind and severity.",
        "",
        "| severity | meaning |",
        "|---|---|",
        "| `open` | host processes reach a pod, or a port of it, that should be closed |",
        "| `broken` | probes, conditions or traffic of a user fail |",
        "| `degraded` | podgate works with less than is configured, or an operator must act |",
        "| `note` | nothing has to be done now |",
        "",
        "| kind | severity | found if | what to do |",
        "|---|---|---|---|",
    ]
    kinds = sorted(KINDS.values(), key=lambda kind: (kind.severity.rank, kind.name))
    lines += [
        f"| `{kind.name}` | {kind.severity} | {kind.meaning} | {kind.remedy} |" for kind in kinds
    ]
    return "\n".join(lines) + "\n"
