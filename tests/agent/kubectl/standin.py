"""A stand-in for the kubectl command: prints given responses, and records how it was called."""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

_SCRIPT = """#!{python} -IS
import json, pathlib, sys
here = pathlib.Path(__file__).parent
# Of a stream it is open as long as the plugin follows.
content = "" if sys.stdin.isatty() or "--follow" in sys.argv else sys.stdin.read()
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([sys.argv[1:], content]) + "\\n")
for response in json.loads((here / "responses").read_text()):
    if all(word in sys.argv[1:] for word in response["words"]):
        sys.stdout.write(response["output"])
        sys.stderr.write(response["error"])
        sys.exit(response["exit_status"])
sys.exit("error: no response for " + " ".join(sys.argv[1:]))
"""


class KubectlStandin:
    """A directory with the command `kubectl`. A later response replaces an earlier one."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.command = str(directory / "kubectl")
        self._responses: list[dict[str, Any]] = []
        self._directory = directory
        script = directory / "kubectl"
        script.write_text(_SCRIPT.format(python=sys.executable), encoding="utf-8")
        script.chmod(0o755)

    def respond(
        self, *words: str, output: object = "", error: str = "", exit_status: int = 0
    ) -> None:
        """To a call with all of these words: `output`, as JSON unless it is a string. error: the
        call fails with this on its standard error."""
        text = output if isinstance(output, str) else json.dumps(output)
        response: dict[str, Any] = {"words": words, "output": text, "error": error}
        response["exit_status"] = exit_status or int(bool(error))
        self._responses.insert(0, response)
        # Whole, for calls that run meanwhile.
        path = self._directory / "responses.new"
        path.write_text(json.dumps(self._responses), encoding="utf-8")
        path.rename(self._directory / "responses")

    def calls(self, *words: str) -> list[tuple[list[str], str]]:
        """Arguments and standard input of the calls with all of these words."""
        path = self._directory / "calls"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [(call, content) for call, content in found if set(words) <= set(call)]

    def serve_nodes(self, *names: str, without_agent: Sequence[str] = ()) -> None:
        """A DaemonSet with a running agent `agent-NODE` on each of these nodes."""
        daemonset = {
            "spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}}
        }
        self.respond("get", "daemonset", output=daemonset)
        nodes = [{"metadata": {"name": name}} for name in names]
        self.respond("get", "nodes", "kubernetes.io/os=linux", output={"items": nodes})
        pods = [agent_pod(name) for name in names if name not in without_agent]
        self.respond("get", "pods", "--namespace=podgate", output={"items": pods})


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
