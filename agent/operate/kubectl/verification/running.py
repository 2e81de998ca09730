"""A run over all nodes, some at a time."""

import concurrent.futures
import dataclasses
import datetime
import secrets
import threading
from collections.abc import Iterable, Sequence

from agent.operate.kubectl import printing
from agent.operate.kubectl.cluster import KubectlError, Object
from agent.operate.kubectl.nodes import ClusterNode
from agent.operate.kubectl.verification import facts, manifests, node_run, targets
from agent.operate.kubectl.verification.access import Access
from agent.operate.kubectl.verification.facts import Facts
from agent.operate.kubectl.verification.node_run import NodeRun, Plan
from agent.operate.kubectl.verification.results import NodeResult, Report
from agent.operate.kubectl.verification.targets import Target

MODES = ("enforce", "strict")
_NODES_AT_ONCE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """namespace: podgate's; of: whose pods are tried, with a canary there that has its mode, or
    empty: all namespaces, with canaries in podgate's namespace; nodes: some, or empty for all;
    samples: most pods of a node that opted in."""

    namespace: str = "podgate"
    of: str = ""
    nodes: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES
    samples: int = 5
    image: str = ""
    origin: str = ""
    wait_seconds: float = 60.0
    has_canaries: bool = True


def run(access: Access, options: Options) -> Report:
    """Raises `KubectlError` if nothing could be tried; KeyboardInterrupt ends it and leaves
    nothing."""
    started = _now()
    found = facts.read(access, options.namespace, options.of, options.image)
    nodes = _chosen(found, options.nodes)
    plan = _plan(options, found)
    for namespace in {plan.namespace, plan.canaries}:
        node_run.sweep(access, namespace)
    samples = {node.name: _samples(found, node.name, options) for node in nodes}
    _announce(access, found, [pod for pods in samples.values() for _, pod in pods])
    end = threading.Event()
    runs = [_node_run(access, plan, found, node.name, samples[node.name], end) for node in nodes]

    def work(node: ClusterNode, run: NodeRun) -> NodeResult:
        if node.problem or end.is_set():
            return NodeResult(node.name, problems=(node.problem or "it was not tried",))
        try:
            result = run.result()
        finally:
            left = run.close()
        return dataclasses.replace(result, problems=(*result.problems, left)) if left else result

    with concurrent.futures.ThreadPoolExecutor(_NODES_AT_ONCE) as pool:
        try:
            done = list(pool.map(work, nodes, runs))
        except BaseException:
            # Nodes that have started delete their pods; the others do not start.
            end.set()
            raise
    return Report(tuple(done), _text(started), _text(_now()))


def _plan(options: Options, found: Facts) -> Plan:
    modes = () if not options.has_canaries else ("",) if options.of else options.modes
    return Plan(
        secrets.token_hex(4),
        options.namespace,
        options.of or options.namespace,
        modes,
        found.image,
        options.origin,
        options.wait_seconds,
    )


def _chosen(found: Facts, names: Sequence[str]) -> list[ClusterNode]:
    if not names:
        return found.nodes
    by_name = {node.name: node for node in found.nodes}
    for name in names:
        if name not in by_name:
            raise KubectlError(f"{name} is no node that podgate's DaemonSet selects")
    return [by_name[name] for name in sorted(set(names))]


def _samples(found: Facts, node: str, options: Options) -> list[tuple[Target, Object]]:
    """Pods of a node that opted in, the first by name."""
    default = targets.default_mode(found.daemonset)
    made = []
    for pod in found.samples:
        namespace = found.namespaces.get(pod["metadata"]["namespace"])
        if pod["spec"].get("nodeName") == node and namespace is not None:
            mode = targets.label_mode(pod, namespace, found.labelled[node], default)
            if (target := targets.of_pod(pod, mode)) is not None:
                made.append((target, pod))
    return sorted(made, key=lambda one: one[0].full_name)[: options.samples]


def _node_run(
    access: Access,
    plan: Plan,
    found: Facts,
    node: str,
    samples: list[tuple[Target, Object]],
    end: threading.Event,
) -> NodeRun:
    namespace = found.namespaces.get(plan.canaries, {"metadata": {}})
    canary_mode = targets.label_mode(
        {"metadata": {}},
        namespace,
        found.labelled.get(node, {"metadata": {}}),
        targets.default_mode(found.daemonset),
    )
    return NodeRun(
        *(access, plan, node, found.agents.get(node)),
        samples=[target for target, _ in samples],
        canary_mode=canary_mode,
        end=end,
    )


def _announce(access: Access, found: Facts, samples: Iterable[Object]) -> None:
    """An Event of the DaemonSet, and of each pod that is tried."""
    objects: list[Object] = [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in samples]
    if found.daemonset is not None:
        objects.insert(0, {"apiVersion": "apps/v1", "kind": "DaemonSet", **found.daemonset})
    for one in objects:
        of = one["metadata"]
        body = manifests.event(
            one,
            "kubectl podgate verify tries to reach pods from their nodes over TCP, UDP and ICMP.",
            _now(),
        )
        try:
            access.create(f"/apis/events.k8s.io/v1/namespaces/{of['namespace']}/events", body)
        except KubectlError as error:
            printing.progress(f"No Event of {of['namespace']}/{of['name']}: {error}")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _text(time: datetime.datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
