"""Pods of podgate's image on nodes whose agent does not run, as `kubectl debug node/NAME` makes
them.

Such a pod has what the agent's has: mounts, rights, the node's network and processes. It is bound
to the node without the scheduler, only sleeps while commands run in it, and is deleted at the
plugin's end; if the plugin is killed, the pod ends by itself.
"""

import json
import threading
import time

from agent.operate.kubectl.cluster import Cluster, KubectlError, Object

LABEL = "app.kubernetes.io/name"
NAME = "podgate-debug"
# What a user may do with one: `drops --follow` in it ends after this time.
_LIFE_SECONDS = 600
_POLL_SECONDS = 0.5
_SLEEP = ("/usr/bin/python3", "-c", f"import time; time.sleep({_LIFE_SECONDS})")
# Fields of the DaemonSet's pods that are of the node, or of the image.
_FIELDS = (
    "hostNetwork",
    "hostPID",
    "dnsPolicy",
    "imagePullSecrets",
    "priorityClassName",
    "volumes",
)
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "env", "securityContext", "volumeMounts")


def manifest(daemonset: Object, node: str) -> Object:
    """The pod of a node, from the DaemonSet whose agents it replaces."""
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = (one for one in spec["containers"] if one["name"] == "agent")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{NAME}-",
            # Not the DaemonSet's own, whose controller would adopt it.
            "labels": {LABEL: NAME, "app.kubernetes.io/part-of": "podgate"},
        },
        "spec": {
            **{name: spec[name] for name in _FIELDS if name in spec},
            "nodeName": node,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIFE_SECONDS,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    **{name: container[name] for name in _CONTAINER_FIELDS if name in container},
                    "name": "agent",
                    "command": list(_SLEEP),
                }
            ],
        },
    }


class DebugPods:
    """One pod for each node that needs one, until `close`. Its methods may be called by several
    threads."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._daemonset: Object | None = None

    def ensure(self, node: str) -> str:
        """The name of the node's pod, once it runs. Raises `KubectlError`."""
        with self._lock:
            name = self._names.get(node)
            if self._daemonset is None:
                self._daemonset = self._cluster.agent_daemonset()
            daemonset = self._daemonset
        if name is None:
            options = (f"--namespace={self._cluster.namespace}", "--filename=-", "--output=json")
            content = json.dumps(manifest(daemonset, node))
            name = json.loads(self._cluster.run("create", *options, content=content))["metadata"][
                "name"
            ]
            with self._lock:
                self._names[node] = name
        self._wait(name)
        return name

    def close(self) -> None:
        """Delete all of them. Raises `KubectlError`."""
        with self._lock:
            names, self._names = sorted(self._names.values()), {}
        if names:
            options = ("--ignore-not-found", "--wait=false", "--grace-period=1")
            place = f"--namespace={self._cluster.namespace}"
            self._cluster.run("delete", "pod", *names, place, *options)

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + self._cluster.timeout_seconds
        while True:
            pod = self._cluster.get("pod", name, f"--namespace={self._cluster.namespace}")
            status = pod.get("status", {})
            containers = status.get("containerStatuses") or [{}]
            state = containers[0].get("state") or {}
            if "running" in state:
                return
            reason = (state.get("waiting") or state.get("terminated") or {}).get("reason", "")
            reason = reason or status.get("reason") or status.get("phase") or "it has no status"
            if "terminated" in state or time.monotonic() >= deadline:
                raise KubectlError(f"its debug pod {name} does not run: {reason}")
            time.sleep(_POLL_SECONDS)
