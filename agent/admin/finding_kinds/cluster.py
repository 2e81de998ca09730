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
WEBHOOK_OBSOLETE = define(
    "webhook-obsolete",
    DEGRADED,
    "A webhook or admission policy that the controller of an earlier release wrote is still there. "
    "Its certificate ends, and it injects readiness gates in addition to the objects of the chart.",
    "Delete it: the Job podgate-webhook-certificate does so, where an upgrade runs that.",
    "kubectl delete {name}",
)
WEBHOOK_RIGHTS_LEFT = define(
    "webhook-rights-left",
    DEGRADED,
    "The account of the webhooks' Job may still write webhooks, and no such Job runs: it failed, "
    "or 'kubectl apply' made the binding again, and a finished one still existed.",
    "Delete the binding; the next installation makes it again.",
    "kubectl delete clusterrolebinding podgate-webhook-certificate",
)
WEBHOOK_UNTRUSTED = define(
    "webhook-untrusted",
    DEGRADED,
    "A webhook of the chart has no caBundle: pods are created without readiness gates, and probe "
    "specs are not validated.",
    "See why the Job podgate-webhook-certificate failed, or write the caBundle: docs/deploy.md, "
    "'Webhooks'. If the Job is gone, install the chart or the manifests again.",
    "kubectl -n podgate logs job/podgate-webhook-certificate",
)
