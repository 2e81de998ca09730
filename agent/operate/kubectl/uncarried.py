"""What no policy can carry over from an open node to gates: fields of pods that depend on where the
kubelet's connections come from and go to."""

from collections.abc import Iterable, Iterator

from agent.operate.kubectl.cluster import Object

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_HOOKS = ("postStart", "preStop")
_NODE_ADDRESS = ("status.hostIP", "status.hostIPs")


def sentences(pods: Iterable[Object]) -> list[str]:
    """One for each finding, of each workload once."""
    found: dict[str, None] = {}
    for pod in pods:
        spec = pod["spec"]
        if spec.get("hostNetwork"):
            continue
        owners = pod["metadata"].get("ownerReferences") or [{}]
        name = owners[0].get("name") or pod["metadata"]["name"]
        for sentence in _of_pod(spec):
            found[f"{pod['metadata']['namespace']}/{name}: {sentence}"] = None
    return list(found)


def _of_pod(spec: Object) -> Iterator[str]:
    for container in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        name = container["name"]
        for field, handler in _handlers(container):
            if host := _host(handler):
                yield (
                    f"{field} of container {name} has host {host}: the kubelet connects there and "
                    "not to the pod, so its gate does not admit that by itself; remove the field."
                )
        if any(_field(variable) in _NODE_ADDRESS for variable in container.get("env", ())):
            yield (
                f"container {name} reads the node's address: if it admits probes by that, they "
                "fail in strict, where they come from the pod's own address "
                '(annotation podgate.io/relay: "off").'
            )


def _handlers(container: Object) -> Iterator[tuple[str, Object]]:
    for field in _PROBES:
        yield field, container.get(field) or {}
    for field in _HOOKS:
        yield field, (container.get("lifecycle") or {}).get(field) or {}


def _host(handler: Object) -> str:
    """Of the field that has the probe's or hook's action."""
    for action in handler.values():
        if isinstance(action, dict) and action.get("host"):
            return str(action["host"])
    return ""


def _field(variable: Object) -> str:
    source = (variable.get("valueFrom") or {}).get("fieldRef") or {}
    return str(source.get("fieldPath", ""))
