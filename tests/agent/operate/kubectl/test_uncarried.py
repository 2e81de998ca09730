"""Fields of pods that no policy carries over to gates."""

from typing import Any

import pytest

from agent.operate.kubectl import uncarried

Json = dict[str, Any]


def pod(container: Json, name: str = "web-7", **further: Any) -> Json:
    """further: of its spec and, as `owners`, its metadata."""
    owners = further.pop("owners", None)
    return {
        "metadata": {"namespace": "shop", "name": name, "ownerReferences": owners},
        "spec": {"containers": [{"name": "app", **container}], **further},
    }


def hosted(field: str, container: str = "app") -> str:
    return (
        f"{field} of container {container} has host db: the kubelet connects there and not to the "
        "pod, so its gate does not admit that by itself; remove the field."
    )


ACTION = {"periodSeconds": 9, "tcpSocket": {"host": "db", "port": 1}}
READS = (
    "container app reads the node's address: if it admits probes by that, they fail in strict, "
    'where they come from the pod\'s own address (annotation podgate.io/relay: "off").'
)


def variable(path: str) -> Json:
    return {"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}}


@pytest.mark.parametrize(
    ("container", "sentences"),
    [
        ({}, []),
        ({"readinessProbe": {"httpGet": {"port": 80}}}, []),
        *(
            ({name: ACTION}, [hosted(name)])
            for name in ("startupProbe", "readinessProbe", "livenessProbe")
        ),
        ({"lifecycle": {"postStart": ACTION}}, [hosted("postStart")]),
        (
            {"livenessProbe": ACTION, "lifecycle": {"postStart": None, "preStop": ACTION}},
            [hosted("livenessProbe"), hosted("preStop")],
        ),
        ({"env": [variable("status.podIP"), {"name": "Y", "value": "x"}]}, []),
        ({"env": [{"name": "Y"}, variable("status.hostIP")]}, [READS]),
        ({"env": [variable("status.hostIPs")]}, [READS]),
    ],
)
def test_what_depends_on_the_nodes_address_is_named(container: Json, sentences: list[str]) -> None:
    assert uncarried.sentences([pod(container)]) == [f"shop/web-7: {one}" for one in sentences]
    assert uncarried.sentences([pod(container, hostNetwork=True), pod(container)]) == [
        f"shop/web-7: {one}" for one in sentences
    ]


def test_workload_is_named_once_by_its_owner() -> None:
    probe = {"readinessProbe": ACTION}
    owners = [{"name": "web"}, {"name": "other"}]
    sidecar = {"name": "proxy", "livenessProbe": ACTION}
    pods = [
        pod(probe, "web-1", owners=owners, initContainers=[sidecar]),
        pod(probe, "web-2", owners=owners),
        pod(probe, "db"),
    ]
    assert uncarried.sentences(pods) == [
        f"shop/web: {hosted('livenessProbe', 'proxy')}",
        f"shop/web: {hosted('readinessProbe')}",
        f"shop/db: {hosted('readinessProbe')}",
    ]
