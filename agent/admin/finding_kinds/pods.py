"""Kinds of findings of pods and of the labels that give them their modes."""

from agent.admin.finding_kinds.kind import DEGRADED, NOTE, OPEN, define

_POD = "podgate explain pod {name}"
_EVENTS = "kubectl describe pod -n {namespace} {pod}"

GATE_BYPASSED = define(
    "gate-bypassed",
    OPEN,
    "The path test reaches the pod without passing its gate.",
    "Check how the CNI routes from the node to the pod; until then use audit.",
    _POD,
)
GATE_FAILED = define(
    "gate-failed",
    OPEN,
    "The pod's gate cannot be attached, or was lost.",
    "Solve the reason in the sentence.",
    "podgate doctor",
)
GATE_NOT_UPDATED = define(
    "gate-not-updated",
    DEGRADED,
    "The pod's gate keeps its last addresses and rules, or has no room for more.",
    "Solve the reason in the sentence, or use fewer rules or addresses.",
    "podgate doctor",
)
NETNS_UNUSABLE = define(
    "netns-unusable",
    OPEN,
    "The pod has no gate, since the named network namespace is missing, invalid or another's.",
    "Name the pod's own network namespace in the manifest's annotation podgate.io/netns.",
    _POD,
)
NOT_SUPPORTED = define(
    "interface-not-supported",
    OPEN,
    "The pod should be enforced, and has an interface to which no gate can be attached.",
    "Configure the network plugin to use veth pairs.",
    _POD,
)
POD_STARTING = define(
    "pod-starting",
    NOTE,
    "The pod has no sandbox, network namespace, interface or probe result yet.",
    "Wait; if it stays, see the pod's Events.",
    _EVENTS,
)
MANIFEST_INVALID = define(
    "manifest-invalid",
    DEGRADED,
    "The pod, its manifest or an annotation cannot be read; the last valid one stays in force.",
    "Correct it.",
    _EVENTS,
)
ANNOTATION_IGNORED = define(
    "annotation-ignored",
    DEGRADED,
    "An annotation of the pod has no effect.",
    "Correct it, or remove it.",
)
PROBE_HOST = define(
    "probe-host-not-allowed",
    DEGRADED,
    "A probe or hook names a host, so the kubelet connects there and not to the pod.",
    "Remove host from the pod's probe or hook.",
    _EVENTS,
)
PROBE_FAILING = define(
    "probe-failing",
    DEGRADED,
    "A probe of the pod fails.",
    "Repair what the probe checks; 'podgate probe' shows each step of it.",
    "podgate probe --pod {name}",
)
PROBE_REDIRECTED = define(
    "probe-redirected",
    DEGRADED,
    "Rules in the pod redirect podgate's probes to another process, such as a mesh's proxy.",
    "Have the rules exempt the loopback interface, or a user other than root; else leave these "
    "probes to the kubelet.",
    _POD,
)
PROBE_CERTIFICATE = define(
    "probe-certificate",
    DEGRADED,
    "A client certificate of the pod's probes is missing, unusable, rejected, or ends soon.",
    "Repair or renew it; without it these probes have no result, and answered ones are proxied.",
    _POD,
)
PROBE_LOOKUPS_DIFFER = define(
    "probe-lookups-differ",
    NOTE,
    "Connections of a tcp probe failed although the pod's listener had room for them, so podgate "
    "connects for each of its probes until the container restarts.",
    "Find what drops connections inside the pod, such as rules that it sets up itself; probes "
    "report its failures as always.",
    _POD,
)
POLICY_NOT_PROGRAMMED = define(
    "policy-not-programmed",
    DEGRADED,
    "The network policies of a new pod were not seen to be in force within the time-out.",
    "Find out why the cluster's policy engine does not act on this node; without an engine, use "
    "--policy-ready=ready, or remove the pod's readiness gate.",
    _POD,
)
POLICY_NOT_CHECKED = define(
    "policy-not-checked",
    DEGRADED,
    "Whether the network policies of a new pod are in force cannot be found out.",
    "Solve the reason in the sentence.",
    _POD,
)
PROBE_NOT_ANSWERED = define(
    "probe-not-answered",
    DEGRADED,
    "podgate is to answer a probe for the kubelet, and cannot.",
    "Solve the reason in the sentence, or remove the pod's annotation.",
    _POD,
)
STRICT_UNAVAILABLE = define(
    "strict-unavailable",
    DEGRADED,
    "The pod is in strict, and the relay does not proxy to it.",
    "Solve the reason in the sentence, or set mode enforce.",
    _POD,
)
EXISTING_FLOWS = define(
    "existing-flows",
    DEGRADED,
    "Flows that the host opened to the pod before enforcement are still open.",
    "--close-existing-flows closes such flows.",
)
ADDRESS_UNCONFIRMED = define(
    "address-unconfirmed",
    DEGRADED,
    "The pod has addresses that neither the runtime nor the node's routes confirm as its own.",
    "Find out why the pod has them; see docs/security.md.",
    _POD,
)
PATH_TEST_FAILED = define(
    "path-test-failed",
    DEGRADED,
    "It could not be tested whether packets to the pod pass its gate.",
    "See the agent's log.",
)

# Of labels.

LABEL_IGNORED = define(
    "label-ignored",
    OPEN,
    "A mode label has a value that is no mode, and pods for which it should decide are not closed.",
    "Correct the label.",
)
MODE_LEFT_BEHIND = define(
    "mode-left-behind",
    OPEN,
    "Labels that enforce are from before podgate was removed and installed again; they do not "
    "close pods until their owner confirms them.",
    "Apply the HostAccessPolicies again, then run 'kubectl podgate enforce NAMESPACE', or the "
    "command of the sentence.",
)
LABEL_INVALID = define(
    "label-invalid",
    DEGRADED,
    "A label has a value that is no mode; no pod is open because of it.",
    "Correct the label.",
)
MODE_NOT_ALLOWED = define(
    "mode-not-allowed",
    DEGRADED,
    "A pod's label is less strict than the namespace allows, and is ignored.",
    "Remove the label, or allow it with podgate.io/mode-override=allowed on the namespace.",
)
MODE_LIMITED = define(
    "mode-limited",
    DEGRADED,
    "A ceiling of the node or of the cluster is below the mode that labels give.",
    "Raise the ceiling that the sentence names, once that is wanted.",
)
CLUSTER_NETWORK_POLICY_NOT_FOLLOWED = define(
    "cluster-network-policy-not-followed",
    DEGRADED,
    "A ClusterNetworkPolicy denies all ingress of a pod, and a ceiling or a label keeps the pod "
    "open to its node.",
    "Raise the ceiling, or remove the label, that the sentence names, once that is wanted.",
    _POD,
)
MODE_KEPT = define(
    "mode-kept",
    NOTE,
    "A gate keeps a stricter mode until the labels of node and namespaces are read.",
    "Wait for the API server.",
)
