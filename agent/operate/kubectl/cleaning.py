"""The DaemonSet while podgate is being removed: its pods run `podgate cleanup`, not the agent.

So each node that has a kubelet gets clean, also one whose agent is dead, and one that reboots or
returns meanwhile: these pods use the host network, so nothing holds them back. A pod is ready when
its node is clean.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from agent.operate.kubectl.cluster import Cluster, KubectlError, Object

LABEL = "podgate.io/cleanup"
_STATE_VARIABLE = "PODGATE_SERVICES_STATE"
_HOST = "/host"
_HOST_RUN = f"{_HOST}/run"
_RUN = "/run/podgate"
_READY_DIRECTORY = "/tmp"  # noqa: S108 - of the pod: an emptyDir in memory


_NAME = "podgate-cleanup"


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """How nodes are cleaned. conf_directory, bin_directory: of podgate-cni, unless the agent's
    options name others; options: more for `podgate cleanup`."""

    conf_directory: str
    bin_directory: str
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Start":
        """By the options of `uninstall`."""
        options = ("--keep-cni-binary",) if arguments.keep_cni_binary else ()
        return cls(arguments.cni_conf_dir, arguments.cni_bin_dir, options)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A node, and why it is not clean yet; empty if it is. is_gone: its Node was deleted, and
    nothing of podgate in the API is of it."""

    node: str
    problem: str = ""
    is_gone: bool = False

    @property
    def state(self) -> str:
        """For people."""
        return self.problem or ("deleted meanwhile" if self.is_gone else "clean")


def is_started(cluster: Cluster) -> bool:
    """Whether the agents are replaced already, or being replaced."""
    return _is_cleaner(cluster.agent_daemonset())


def start(cluster: Cluster, how: Start) -> None:
    """Replace the agents. Safe to repeat."""
    found = cluster.agent_daemonset()
    if _is_cleaner(found):
        return
    patch = json.dumps(patch_of(found, how))
    arguments = (f"--namespace={cluster.namespace}", "--type=merge", f"--patch={patch}")
    cluster.run("patch", "daemonset", cluster.daemonset, *arguments)


def start_pods(cluster: Cluster, how: Start, nodes: Sequence[str]) -> None:
    """Clean nodes that the DaemonSet does not select, each by a pod of its own. Safe to repeat."""
    if not nodes:
        return
    place = f"--namespace={cluster.namespace}"
    daemonset = cluster.agent_daemonset()
    done = _pods(cluster)
    for node in nodes:
        if node not in done:
            pod = json.dumps(pod_of(daemonset, how, node))
            cluster.run("create", place, "--filename=-", content=pod)


def delete_pods(cluster: Cluster) -> None:
    """Delete the pods of `start_pods`."""
    place = f"--namespace={cluster.namespace}"
    found = cluster.items("pods", place, "-l", f"app.kubernetes.io/name={_NAME}")
    if names := [one["metadata"]["name"] for one in found]:
        cluster.run("delete", "pods", *names, place, "--ignore-not-found", "--wait=false")


def pod_of(daemonset: Object, how: Start, node: str) -> Object:
    """The pod that cleans this node, bound to it without the scheduler."""
    spec = daemonset["spec"]["template"]["spec"]
    if not _is_cleaner(daemonset):
        spec = {**spec, **patch_of(daemonset, how)["spec"]["template"]["spec"]}
    left_out = ("affinity", "nodeSelector", "serviceAccountName", "serviceAccount")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{_NAME}-",
            # Not the DaemonSet's own, whose controller would adopt it.
            "labels": {LABEL: "uninstall", "app.kubernetes.io/name": _NAME},
        },
        "spec": {
            **{key: value for key, value in spec.items() if key not in left_out},
            "nodeName": node,
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
        },
    }


def _is_cleaner(daemonset: Object) -> bool:
    return LABEL in daemonset["spec"]["template"]["metadata"].get("labels", {})


def patch_of(daemonset: Object, how: Start) -> Object:
    """The merge patch of the DaemonSet; lists are replaced as a whole."""
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = (one for one in spec["containers"] if one["name"] == "agent")
    own = _options(container.get("args", []))
    conf = own.get("--cni-conf-dir", how.conf_directory)
    bin_ = own.get("--cni-bin-dir", how.bin_directory)
    run = own.get("--run-directory", _RUN)
    state = own.get("--services-state")
    directories = {"/run": _HOST_RUN, conf: conf, bin_: bin_}
    replaced = {run, conf, bin_}
    if state:
        # A directory cannot be removed from the pod that mounts it.
        directory = pathlib.PurePosixPath(state).parent
        directories[str(directory.parent)] = f"{_HOST}{directory.parent}"
        replaced.add(str(directory))
    cleaner = {
        **container,
        "args": [
            "cleanup",
            "--uninstall",
            f"--cni-conf-dir={conf}",
            f"--cni-bin-dir={bin_}",
            f"--run-directory={_HOST}{run}",
            *([f"--bpffs={own['--bpffs']}"] if "--bpffs" in own else []),
            f"--pod-directory={_READY_DIRECTORY}",
            *how.options,
        ],
        # No option: an image of an earlier version does not have it.
        "env": [
            *container.get("env", []),
            *([{"name": _STATE_VARIABLE, "value": f"{_HOST}{state}"}] if state else []),
        ],
        "volumeMounts": [
            *(one for one in container["volumeMounts"] if one["mountPath"] not in replaced),
            *(
                # What is unmounted on the node must not stay mounted here: /run has file systems of
                # containers.
                {
                    "name": f"podgate-{number}",
                    "mountPath": inside,
                    "mountPropagation": "HostToContainer",
                }
                for number, inside in enumerate(directories.values())
            ),
        ],
    }
    volumes = [
        *spec["volumes"],
        *(
            {"name": f"podgate-{number}", "hostPath": {"path": path}}
            for number, path in enumerate(directories)
        ),
    ]
    return {
        "spec": {
            "minReadySeconds": 0,
            # All nodes at once, and no new pod before the old one is gone, with its agent.
            "updateStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"},
            },
            "template": {
                "metadata": {"labels": {LABEL: "uninstall"}},
                "spec": {"containers": [cleaner], "volumes": volumes},
            },
        }
    }


def verdicts(cluster: Cluster, nodes: Collection[str]) -> list[Verdict]:
    """Of each of these nodes."""
    pods = _pods(cluster)
    problems = {node.name: node.problem for node in cluster.all_nodes()}
    return [
        Verdict(node, _problem(cluster, pods.get(node), problems.get(node, "")))
        if node in problems or node in pods
        else Verdict(node, is_gone=True)
        for node in sorted(nodes)
    ]


def _pods(cluster: Cluster) -> dict[str, Object]:
    """Pods that clean, by node."""
    place = f"--namespace={cluster.namespace}"
    found = cluster.items("pods", place, "-l", f"{LABEL}=uninstall")
    return {pod["spec"].get("nodeName", ""): pod for pod in found}


def _problem(cluster: Cluster, pod: Object | None, of_node: str) -> str:
    """of_node: why the node cannot be reached."""
    status = pod.get("status", {}) if pod else {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
    if pod and conditions.get("Ready") == "True":
        return ""
    if of_node:
        return f"no response: {of_node}"
    if pod is None:
        return "no response: the agent's pod is not replaced yet; is the node's kubelet running?"
    log = ""
    place = (f"--namespace={cluster.namespace}", "--container=agent", "--tail=1")
    try:
        log = cluster.run("logs", pod["metadata"]["name"], *place).strip()
        # While the container waits for its next start, the current log may be empty.
        log = log or cluster.run("logs", pod["metadata"]["name"], *place, "--previous").strip()
    except KubectlError as error:
        log = log or str(error)
    return f"not clean yet: {log or status.get('phase', 'the pod has not started')}"


def _options(arguments: list[Any]) -> dict[str, str]:
    """Options of a command line with their values, as --name=value or --name value."""
    found: dict[str, str] = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, separator, value = str(argument).partition("=")
        if name.startswith("--"):
            found[name] = value if separator else str(following)
    return found
