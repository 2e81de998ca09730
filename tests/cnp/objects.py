"""The objects of one run: a namespace, a pod for each case, and the pods that connect to them."""

from tests.cnp.cases import Case
from tests.cnp.kubectl import Json

RUN_LABEL = "podgate.io/conformance-run"
HOST_PROCESS, HOST_NETWORK, WITNESS = "host-process", "host-network", "witness"
"""Names of pods: the first two are origins, the third an ordinary pod."""
PORT = 8080

# Of the node, in the pod whose processes leave their cgroup.
_CGROUPS = "/node-cgroup"
_SERVER = f"mkdir -p /tmp/www && exec httpd -f -p {PORT} -h /tmp/www"
# A second after the first probe that fails, the pod is not Ready.
_PROBE: Json = {
    "tcpSocket": {"port": PORT},
    "periodSeconds": 1,
    "timeoutSeconds": 1,
    "failureThreshold": 1,
}


def namespace(name: str) -> Json:
    """One in which the Pod Security Standards allow pods on the host's network."""
    labels = {
        RUN_LABEL: name,
        "pod-security.kubernetes.io/enforce": "privileged",
        "pod-security.kubernetes.io/warn": "privileged",
    }
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def server(case: Case, *, run: str, node: str, image: str) -> Json:
    container = {
        "name": "server",
        "image": image,
        "command": ["sh", "-c", _SERVER],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": _PROBE,
    }
    return _pod(case.name, run, node, container, labels=case.labels)


def origins(*, run: str, node: str, image: str) -> list[Json]:
    """The pods that connect. A privileged container has the node's cgroup namespace, so that a
    process of it may move to another cgroup."""
    sleeping = {"name": "origin", "image": image, "command": ["sleep", "2147483647"]}
    volume = {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup"}}
    moving = {
        **sleeping,
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "cgroup", "mountPath": _CGROUPS}],
    }
    return [
        _pod(HOST_PROCESS, run, node, moving, hostNetwork=True, volumes=[volume]),
        _pod(HOST_NETWORK, run, node, sleeping, hostNetwork=True),
        _pod(WITNESS, run, node, sleeping),
    ]


def policies(case: Case, *, run: str) -> list[Json]:
    found = case.cluster_network_policies(f"{run}-")
    for one in found:
        one["metadata"]["labels"] = {RUN_LABEL: run}
    return [*found, *case.own_network_policies(run)]


def connecting(addresses: dict[str, str]) -> str:
    """A script that connects to all of them at once. It prints a name for each that it reaches."""
    tries = [
        f"(nc -w 2 {address} {PORT} </dev/null >/dev/null 2>&1 && echo {name}) &"
        for name, address in addresses.items()
    ]
    return "\n".join([*tries, "wait"])


def as_host_process(script: str, *, run: str) -> str:
    """The same in a cgroup of no pod. It ends with an error if it cannot leave that of its pod."""
    return (
        f"set -e\n{_FIND_CGROUPS}\nmkdir -p $root/{run}\necho $$ > $root/{run}/cgroup.procs\n"
        + (f"set +e\n{script}")
    )


def removing_cgroup(run: str) -> str:
    return f"{_FIND_CGROUPS}\nrmdir $root/{run}"


# Version 2, at the top or beside version 1.
_FIND_CGROUPS = (
    f"root={_CGROUPS}\nif [ -f $root/unified/cgroup.procs ]; then root=$root/unified; fi"
)


def _pod(
    name: str,
    run: str,
    node: str,
    container: Json,
    *,
    labels: dict[str, str] | None = None,
    **spec: object,
) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": run, "labels": {RUN_LABEL: run, **(labels or {})}},
        "spec": {
            "nodeName": node,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
            **spec,
        },
    }
