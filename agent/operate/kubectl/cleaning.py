"""The DaemonSet while podgate is being removed: its pods run `podgate cleanup`, not the agent.

So each node that has a kubelet gets clean, also one whose agent is dead, and one that reboots or
returns meanwhile: these pods use the host network, so nothing holds them back. A pod is ready when
its node is clean.
"""

import dataclasses
import json
from typing import Any

from agent.operate.kubectl.cluster import Cluster, KubectlError, Object

LABEL = "podgate.io/cleanup"
_HOST_RUN = "/host/run"
_RUN = "/run/podgate"
_READY_DIRECTORY = "/tmp"  # noqa: S108 - of the pod: an emptyDir in memory


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A node, and why it is not clean yet; empty if it is."""

    node: str
    problem: str = ""


def is_started(cluster: Cluster) -> bool:
    """Whether the agents are replaced already, or being replaced."""
    place = f"--namespace={cluster.namespace}"
    return _is_cleaner(cluster.get("daemonset", cluster.daemonset, place))


def start(cluster: Cluster, *, conf_directory: str, bin_directory: str, options: list[str]) -> None:
    """Replace the agents. Safe to repeat. conf_directory, bin_directory: of podgate-cni, unless the
    agent's options name others; options: more for `podgate cleanup`."""
    place = f"--namespace={cluster.namespace}"
    found = cluster.get("daemonset", cluster.daemonset, place)
    if _is_cleaner(found):
        return
    patch = patch_of(
        found, conf_directory=conf_directory, bin_directory=bin_directory, options=options
    )
    arguments = (place, "--type=merge", f"--patch={json.dumps(patch)}")
    cluster.run("patch", "daemonset", cluster.daemonset, *arguments)


def _is_cleaner(daemonset: Object) -> bool:
    return LABEL in daemonset["spec"]["template"]["metadata"].get("labels", {})


def patch_of(
    daemonset: Object, *, conf_directory: str, bin_directory: str, options: list[str]
) -> Object:
    """The merge patch of the DaemonSet; lists are replaced as a whole."""
    spec = daemonset["spec"]["template"]["spec"]
    (container,) = (one for one in spec["containers"] if one["name"] == "agent")
    own = _options(container.get("args", []))
    conf = own.get("--cni-conf-dir", conf_directory)
    bin_ = own.get("--cni-bin-dir", bin_directory)
    run = own.get("--run-directory", _RUN)
    directories = {"/run": _HOST_RUN, conf: conf, bin_: bin_}
    cleaner = {
        **container,
        "args": [
            "cleanup",
            "--uninstall",
            f"--cni-conf-dir={conf}",
            f"--cni-bin-dir={bin_}",
            f"--run-directory=/host{run}",
            *([f"--bpffs={own['--bpffs']}"] if "--bpffs" in own else []),
            f"--pod-directory={_READY_DIRECTORY}",
            *options,
        ],
        "volumeMounts": [
            *(
                one
                for one in container["volumeMounts"]
                if one["mountPath"] not in (run, conf, bin_)
            ),
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


def verdicts(cluster: Cluster) -> list[Verdict]:
    """Of each node that podgate was to run on."""
    place = f"--namespace={cluster.namespace}"
    pods = {
        pod["spec"].get("nodeName"): pod
        for pod in cluster.items("pods", place, "-l", f"{LABEL}=uninstall")
    }
    return [Verdict(node, _problem(cluster, pods.get(node))) for node in cluster.nodes()]


def _problem(cluster: Cluster, pod: Object | None) -> str:
    if pod is None:
        return "no response: the agent's pod is not replaced yet; is the node's kubelet running?"
    status = pod.get("status", {})
    conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
    if conditions.get("Ready") == "True":
        return ""
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
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, separator, value = str(argument).partition("=")
        if name.startswith("--"):
            found[name] = value if separator else str(following)
    return found
