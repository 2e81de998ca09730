"""Kinds of findings of a cluster, by `kubectl podgate`."""

from agent.admin.finding_kinds.kind import BROKEN, DEGRADED, define

NO_ANSWER = define(
    "no-answer",
    BROKEN,
    "No agent of the node answers `kubectl podgate`.",
    "Solve the reason in the sentence; on the node, 'podgate status' works without an agent.",
)
NODE_LEFT = define(
    "node-left",
    BROKEN,
    "A node had an agent, and the DaemonSet does not select it any more: its gates stay, and "
    "conditions and rules do not follow its pods.",
    "Select the node again, or remove podgate from it with 'kubectl podgate uninstall --node'.",
)
ROLL_OUT_STUCK = define(
    "roll-out-stuck",
    DEGRADED,
    "A new version of the DaemonSet does not reach all nodes. The others keep their agents.",
    "Solve the reason in the sentence, or 'kubectl rollout undo'. Without one, the DaemonSet "
    "controller may have lost a timer: annotate the newest pod.",
    "kubectl -n podgate get pods -o wide",
)
POLICY_NAMESPACE_MISSING = define(
    "policy-namespace-missing",
    DEGRADED,
    "A HostAccessPolicy names a namespace that does not exist, for pods or for a source.",
    "Correct the name, or create the namespace.",
    "kubectl get hostaccesspolicy {name} -o yaml",
)
CONTROLLER_MISSING = define(
    "controller-missing",
    DEGRADED,
    "No replica of podgate-controller is available: policies get no status, and its webhooks do "
    "not answer.",
    "Start it: 'kubectl -n podgate scale deployment podgate-controller --replicas=2'; if its pods "
    "fail, see their log.",
    "kubectl -n podgate describe deployment podgate-controller",
)
