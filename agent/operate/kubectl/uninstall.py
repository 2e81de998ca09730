"""`kubectl podgate uninstall`: off, then every node, then the API's objects, the CRD last."""

import argparse
import pathlib
import time
from collections.abc import Iterable

from agent.operate.kubectl import cleaning, conditions, leftovers, off, printing
from agent.operate.kubectl.cluster import Cluster, KubectlError, Object

_NAME = "app.kubernetes.io/name"
_OWN = "podgate"

# Before all else: what would give new pods a readiness gate.
_ADMISSION = (
    "mutatingadmissionpolicybindings",
    "mutatingadmissionpolicies",
    "mutatingwebhookconfigurations",
    "validatingadmissionpolicybindings",
    "validatingadmissionpolicies",
    "validatingwebhookconfigurations",
)
# What restores that: controllers of previous versions, and the Job of their webhooks' certificate.
_WRITERS = ("deployments.apps", "cronjobs.batch", "jobs.batch")
_NAMESPACED = (
    *_WRITERS,
    "daemonsets.apps",
    "poddisruptionbudgets.policy",
    "networkpolicies.networking.k8s.io",
    # Before Secrets, which cert-manager would write again.
    "certificates.cert-manager.io",
    "issuers.cert-manager.io",
    "resourcequotas",
    "podmonitors.monitoring.coreos.com",
    "prometheusrules.monitoring.coreos.com",
    "services",
    "configmaps",
    "secrets",
    "rolebindings.rbac.authorization.k8s.io",
    "roles.rbac.authorization.k8s.io",
    "serviceaccounts",
    "leases.coordination.k8s.io",
)
_CLUSTER = (
    "clusterrolebindings.rbac.authorization.k8s.io",
    "clusterroles.rbac.authorization.k8s.io",
)
_CRDS = "customresourcedefinitions.apiextensions.k8s.io"

KINDS = (*_ADMISSION, *_NAMESPACED, *_CLUSTER, _CRDS)
"""Of all objects of the chart, but for its namespace."""

_POLL_SECONDS = 1.0
_DELETE_SECONDS = 120.0
_PLAN = """\
This removes podgate from the cluster:
  1. Injection and guards, and the controller{workloads}.
  2. All gates open (podgate.io/max-mode=off).
  3. On each node: podgate-cni's entry and binary, pins, interfaces, tables, saved state.
     Nodes: {nodes}.
  4. Conditions of pods with readiness gates of podgate stay True, with reason Removed.
  5. Namespace {namespace}, rights, and last the CustomResourceDefinition with all
     HostAccessPolicies, which are saved to {policies} before."""
_PROXY = "podgate-proxy"
_PROXY_NOTE = (
    "Services that podgate-proxy carries stop on all nodes: install kube-proxy, or what else is to "
    "carry them, before."
)


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Remove podgate from the whole cluster."
    parser = commands.add_parser("uninstall", help=text, description=text)
    parser.add_argument("--yes", action="store_true", help="Do it; without, print what it does.")
    parser.add_argument(
        "--node-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="Time for all nodes to become clean (default: 300).",
    )
    parser.add_argument(
        "--leave-nodes",
        action="store_true",
        help="Continue although nodes are not clean; each of them needs work by hand.",
    )
    parser.add_argument(
        "--leave-gated-templates",
        action="store_true",
        help="Continue although pod templates have readiness gates of podgate; new pods of these "
        "never become Ready.",
    )
    parser.add_argument("--cni-conf-dir", default="/etc/cni/net.d", help="On the nodes.")
    parser.add_argument("--cni-bin-dir", default="/opt/cni/bin", help="On the nodes.")
    parser.add_argument(
        "--keep-cni-binary",
        action="store_true",
        help="Keep podgate-cni's binary: CRI-O needs it to delete running pods.",
    )
    parser.add_argument(
        "--policies-file",
        type=pathlib.Path,
        default=pathlib.Path("hostaccesspolicies.json"),
        metavar="FILE",
        help="Where HostAccessPolicies are saved (default: hostaccesspolicies.json).",
    )
    parser.add_argument(
        "--labels",
        choices=("keep", "remove"),
        help="Keep or remove labels podgate.io/* of namespaces and nodes. Needed if one of them "
        "enforces: after the next installation, labels that were kept have no effect until you "
        "confirm each.",
    )
    parser.add_argument(
        "--node",
        action="append",
        metavar="NAME",
        help="Clean only this node, which the DaemonSet does not select any more.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """1 if something is left. Safe to repeat: it continues where it stopped."""
    if arguments.node:
        return _clean_some(arguments, cluster)
    labelled = leftovers.labelled(cluster)
    if not arguments.yes:
        _show_plan(arguments, cluster, labelled)
        return 1
    if not _check_templates(arguments, cluster) or not _check_labels(arguments, labelled):
        return 1
    _delete_own(cluster, _WRITERS, cluster.namespace)
    _delete_own(cluster, _ADMISSION)
    # A proxy would restore what is removed on its node.
    _delete_own(cluster, ("daemonsets.apps",), cluster.namespace, but=cluster.daemonset)
    if _has_daemonset(cluster) and not _clean_nodes(arguments, cluster):
        return 1
    problems = _settle(cluster)
    # Before the DaemonSet is gone: without it, the next installation may come at any time.
    if arguments.labels != "remove":
        labelled = leftovers.mark(cluster, labelled)
    _delete_own(cluster, _NAMESPACED, cluster.namespace)
    cleaning.delete_pods(cluster)
    # Pods that started meanwhile; no agent is left that could write.
    problems = _settle(cluster) or problems
    # What a controller wrote that was still ending.
    _delete_own(cluster, _ADMISSION)
    _delete_own(cluster, _CLUSTER)
    _delete_namespace(cluster, is_forced=arguments.leave_nodes)
    apply_policies = leftovers.save_policies(cluster, arguments.policies_file)
    _delete_own(cluster, (_CRDS,))
    if arguments.labels == "remove":
        labelled = leftovers.remove_labels(cluster, labelled)
    leftovers.show(labelled, apply_policies)
    if problems:
        printing.line(f"Conditions that could not be written: {conditions.describe(problems)}")
        return 1
    printing.line("podgate is removed.")
    return 0


def _show_plan(
    arguments: argparse.Namespace, cluster: Cluster, labelled: list[leftovers.Labelled]
) -> None:
    names = [
        one["metadata"]["name"]
        for kind in ("deployments.apps", "daemonsets.apps")
        for one in cluster.items_if_served(kind, f"--namespace={cluster.namespace}")
        if _is_own(one) and one["metadata"]["name"] != cluster.daemonset
    ]
    others = [name for name in names if not name.endswith("-controller")]
    nodes = cluster.nodes() if _has_daemonset(cluster) else []
    plan = _PLAN.format(
        workloads=f"; {', '.join(others)}" if others else "",
        nodes=", ".join(nodes) or "none",
        namespace=cluster.namespace,
        policies=arguments.policies_file,
    )
    printing.line(plan)
    if _PROXY in names:
        printing.line(_PROXY_NOTE)
    if arguments.labels != "remove":
        leftovers.show(labelled, "")
    printing.line("Run it with --yes.")


def _check_labels(arguments: argparse.Namespace, labelled: list[leftovers.Labelled]) -> bool:
    """Whether there is a decision on labels that enforce."""
    enforcing = [one for one in labelled if one.enforces]
    if not enforcing or arguments.labels:
        return True
    printing.line("These labels enforce:")
    for one in enforcing:
        printing.line(f"  {one.sentence}")
    printing.line(
        "Decide with --labels=keep or --labels=remove. Labels that are kept have no effect in the "
        "next installation until you confirm them; remove removes all labels podgate.io/* of "
        "namespaces and nodes. Nothing was changed."
    )
    return False


def _clean_some(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Clean nodes that the DaemonSet does not select: its agents run on the others."""
    existing = {node.name: node for node in cluster.all_nodes()}
    for name in arguments.node:
        if name not in existing:
            raise KubectlError(f"{name} is no node that had an agent")
        if existing[name].is_selected:
            raise KubectlError(
                f"{name} is selected by DaemonSet {cluster.daemonset}, so its agent would install "
                "everything again; change the DaemonSet's node selector before"
            )
    if not arguments.yes:
        printing.line(f"This removes podgate from {', '.join(arguments.node)}. Run it with --yes.")
        return 1
    start = cleaning.Start.of(arguments)
    cleaning.start_pods(cluster, start, arguments.node)
    try:
        found = _wait_until_clean(cluster, arguments.node_timeout, arguments.node)
    finally:
        cleaning.delete_pods(cluster)
    printing.table([("NODE", "STATE"), *((one.node, one.state) for one in found)])
    for one in found:
        if not one.problem:
            _delete(cluster, "nodereports.podgate.io", one.node)
    return int(any(one.problem for one in found))


def _check_templates(arguments: argparse.Namespace, cluster: Cluster) -> bool:
    found = conditions.gated_templates(cluster)
    if not found:
        return True
    printing.line("Workloads with readiness gates of podgate in their pod templates:")
    for name in found:
        printing.line(f"  {name}")
    if arguments.leave_gated_templates:
        return True
    printing.line(
        "Their new pods would never become Ready. Remove spec.template.spec.readinessGates there, "
        "then repeat; or use --leave-gated-templates. Nothing was changed."
    )
    return False


def _clean_nodes(arguments: argparse.Namespace, cluster: Cluster) -> bool:
    """Whether the removal may continue."""
    if not cleaning.is_started(cluster):
        printing.progress("Opening all gates ...")
        off.label(cluster, None, off.OFF)
        late = off.wait(cluster, cluster.nodes(), lambda state: state.is_off)
        for node, problem in sorted(late.items()):
            if problem:
                printing.progress(f"{node}: {problem}; continuing, its cleanup detaches all")
    printing.progress("Cleaning the nodes ...")
    start = cleaning.Start.of(arguments)
    cleaning.start(cluster, start)
    every = cluster.all_nodes()
    cleaning.start_pods(cluster, start, [node.name for node in every if not node.is_selected])
    found = _wait_until_clean(cluster, arguments.node_timeout, [node.name for node in every])
    printing.table([("NODE", "STATE"), *((one.node, one.state) for one in found)])
    left = [one.node for one in found if one.problem]
    if not left:
        return True
    if arguments.leave_nodes:
        printing.line(
            f"Left as they are: {', '.join(left)}. On each run the lines of docs/off.md, 'Without "
            "agent or Python', and remove podgate-cni from /etc/cni/net.d: with strictStart no pod "
            "starts there otherwise."
        )
        return True
    printing.line(
        f"{len(left)} of {len(found)} nodes are not clean. podgate is off, and the DaemonSet "
        "cleans each node when it returns. Repeat the command, or use --leave-nodes."
    )
    return False


def _wait_until_clean(cluster: Cluster, seconds: float, nodes: list[str]) -> list[cleaning.Verdict]:
    deadline = time.monotonic() + seconds
    while True:
        # Pods that start without an agent would wait for their conditions.
        _settle(cluster)
        found = cleaning.verdicts(cluster, nodes)
        if not any(one.problem for one in found) or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_SECONDS)


def _settle(cluster: Cluster) -> list[str]:
    return conditions.settle(cluster)[1]


def _has_daemonset(cluster: Cluster) -> bool:
    names = cluster.items("daemonsets", f"--namespace={cluster.namespace}")
    return any(one["metadata"]["name"] == cluster.daemonset for one in names)


def _is_own(found: Object) -> bool:
    """By its label: of the chart, or of the manifests."""
    name: str = found["metadata"].get("labels", {}).get(_NAME, "")
    return name.startswith(_OWN)


def _delete_own(
    cluster: Cluster, kinds: Iterable[str], namespace: str = "", *, but: str = ""
) -> None:
    """Delete podgate's objects of these kinds. but: the name of one that stays."""
    place = [f"--namespace={namespace}"] if namespace else []
    for kind in kinds:
        names = [
            one["metadata"]["name"]
            for one in cluster.items_if_served(kind, *place)
            if _is_own(one) and one["metadata"]["name"] != but
        ]
        if names:
            _delete(cluster, kind, *names, *place)


def _delete_namespace(cluster: Cluster, *, is_forced: bool) -> None:
    """Only one that podgate's manifests made. is_forced: without waiting for kubelets that do not
    respond to end its pods."""
    found = cluster.items("namespaces", "-l", f"{_NAME}={_OWN}")
    if cluster.namespace in [one["metadata"]["name"] for one in found]:
        if is_forced:
            place = f"--namespace={cluster.namespace}"
            _delete(cluster, "pods", "--all", place, "--force", "--grace-period=0")
        _delete(cluster, "namespace", cluster.namespace)
    else:
        off.label(cluster, None, None)


def _delete(cluster: Cluster, kind: str, *arguments: str) -> None:
    """Wait until the objects are gone."""
    printing.progress(f"Deleting {kind} {' '.join(one for one in arguments if one[0] != '-')}")
    options = ("--ignore-not-found", "--wait", f"--timeout={_DELETE_SECONDS:.0f}s")
    cluster.run("delete", kind, *arguments, *options, timeout_seconds=_DELETE_SECONDS)
