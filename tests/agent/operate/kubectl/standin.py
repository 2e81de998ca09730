"""A stand-in for the kubectl command: prints given responses, and records how it was called."""

import json
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

# A shell starts in a tenth of the time of Python. Arguments of a call end with an escape code that
# no argument has, and the call with a line: it is one write, so calls at the same time stay whole.
_SCRIPT = """#!/bin/sh
here=${0%/*}
has() {
    wanted=$1
    shift
    for word; do [ "$word" = "$wanted" ] && return; done
    return 1
}
# A stream's is open as long as the plugin follows.
has --follow "$@" || ! [ -p /dev/stdin ] || cat > "$here/content.$$"
printf '%s\\037' "$@" "$$" "
" >> "$here/calls"
. "$here/responses"
echo "error: no response for $*" >&2
exit 1
"""


_LABELS = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}


class KubectlStandin:
    """A directory with the command `kubectl`. A later response replaces an earlier one."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.command = str(directory / "kubectl")
        self._responses = ""
        self._directory = directory
        script = directory / "kubectl"
        script.write_text(_SCRIPT, encoding="utf-8")
        script.chmod(0o755)
        (directory / "responses").touch()

    def respond(
        self, *words: str, output: object = "", error: str = "", exit_status: int = 0
    ) -> None:
        """To a call with all of these words: `output`, as JSON unless it is a string. error: the
        call fails with this on its standard error."""
        text = output if isinstance(output, str) else json.dumps(output)
        conditions = " && ".join(f'has {shlex.quote(word)} "$@"' for word in words)
        response = (
            f"if {conditions}; then\n"
            f"printf %s {shlex.quote(text)}\nprintf %s {shlex.quote(error)} >&2\n"
            f"exit {exit_status or int(bool(error))}\nfi\n"
        )
        self._responses = response + self._responses
        # Whole, for calls that run meanwhile.
        path = self._directory / "responses.new"
        path.write_text(self._responses, encoding="utf-8")
        path.rename(self._directory / "responses")

    def calls(self, *words: str) -> list[tuple[list[str], str]]:
        """Arguments and standard input of the calls with all of these words."""
        path = self._directory / "calls"
        recorded = path.read_text(encoding="utf-8") if path.exists() else ""
        found = []
        for call in recorded.split("\x1f\n\x1f")[:-1]:
            *arguments, process = call.split("\x1f")
            content = self._directory / f"content.{process}"
            if set(words) <= set(arguments):
                text = content.read_text(encoding="utf-8") if content.exists() else ""
                found.append((arguments, text))
        return found

    def serve_nodes(self, *names: str, without_agent: Sequence[str] = ()) -> None:
        """A DaemonSet with a running agent `agent-NODE` on each of these nodes."""
        container = {"name": "agent", "image": "podgate:1", "volumeMounts": []}
        spec = {
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "hostNetwork": True,
            "containers": [container],
            "volumes": [],
        }
        daemonset = {"spec": {"template": {"metadata": {}, "spec": spec}}}
        self.respond("get", "daemonset", output=daemonset)
        self.respond("get", "namespaces", output={"items": []})
        self.respond("get", "nodes", output={"items": [node(name) for name in names]})
        self.respond("get", "nodereports.podgate.io", output={"items": []})
        pods = [agent_pod(name) for name in names if name not in without_agent]
        self.respond("get", "pods", "--namespace=podgate", output={"items": pods})

    def serve_debug_pod(self, node: str, *, state: str = "running") -> str:
        """The pod that is made on this node, by its name."""
        name = f"podgate-debug-{node}"
        self.respond("create", output={"metadata": {"name": name}})
        status = {"containerStatuses": [{"name": "agent", "state": {state: {"reason": "Because"}}}]}
        self.respond("get", "pod", name, output={"status": status})
        self.respond("delete", "pod")
        return name


def node(name: str, *, ready: str = "True", **labels: str) -> dict[str, Any]:
    """The parts of a Node that the plugin reads."""
    condition = {
        "type": "Ready",
        "status": ready,
        "lastTransitionTime": "2026-11-22T09:00:00Z",
        "message": "Kubelet stopped posting node status." if ready != "True" else "ready",
    }
    return {
        "metadata": {"name": name, "labels": {**_LABELS, **labels}},
        "status": {"conditions": [condition]},
    }


def agent_pod(node: str) -> dict[str, Any]:
    """The parts of an agent's pod that the plugin reads."""
    return {
        "metadata": {
            "name": f"agent-{node}",
            "creationTimestamp": "2026-11-22T10:00:00Z",
            "ownerReferences": [{"kind": "DaemonSet", "name": "podgate"}],
        },
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "agent", "restartCount": 0, "state": {"running": {}}}],
        },
    }
