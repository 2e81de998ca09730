"""The plugin's command line. A command is a module with `register`, listed in `_COMMANDS`.

`register` adds a parser with `set_defaults(run=...)`; `run` gets the arguments and the cluster,
returns the exit status, and may raise `KubectlError`.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from agent import VERSION
from agent.operate.kubectl import (
    completion,
    doctor,
    drops,
    enforce,
    exec,
    explain,
    off,
    option_types,
    status,
    strict,
    suggest,
    uninstall,
    verify,
    why_not_ready,
)
from agent.operate.kubectl.cluster import Cluster, KubectlError
from agent.operate.kubectl.debug_pods import DebugPods
from agent.operate.kubectl.exit_status import INTERRUPTED, NO
from agent.operate.kubectl.reading import Reader

_COMPLETION_SECONDS = 2.0

_COMMANDS = (
    status,
    drops,
    explain,
    why_not_ready,
    doctor,
    verify,
    suggest,
    enforce,
    strict,
    exec,
    off,
    uninstall,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="kubectl podgate", description="Operate podgate in a whole cluster."
    )
    made.add_argument("--version", action="version", version=f"kubectl-podgate {VERSION}")
    made.add_argument("--kubectl", default="kubectl", help="The kubectl command.")
    made.add_argument("--kubeconfig", help="As for kubectl.")
    made.add_argument("--context", help="As for kubectl.")
    made.add_argument(
        "--podgate-namespace", default="podgate", help="Namespace of podgate (default: podgate)."
    )
    made.add_argument(
        "--timeout",
        type=option_types.seconds,
        default=10.0,
        metavar="SECONDS",
        help="Time for each request and for each node (default: 10).",
    )
    made.add_argument(
        "--debug-pods",
        action="store_true",
        help="On nodes whose agent does not run, run commands in a pod of its image, which is made "
        "there for that time and has the agent's rights.",
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parsed = parser().parse_args(arguments)
    kubectl = [parsed.kubectl]
    if parsed.kubeconfig:
        kubectl.append(f"--kubeconfig={parsed.kubeconfig}")
    if parsed.context:
        kubectl.append(f"--context={parsed.context}")
    cluster = Cluster(kubectl, namespace=parsed.podgate_namespace, timeout_seconds=parsed.timeout)
    run: Callable[[argparse.Namespace, Cluster], int] = parsed.run
    try:
        with contextlib.ExitStack() as stack:
            reader = Reader(cluster, _namespace(parsed))
            cluster.reader = stack.enter_context(contextlib.closing(reader))
            if parsed.debug_pods:
                cluster.debug_pods = stack.enter_context(contextlib.closing(DebugPods(cluster)))
            status = run(parsed, cluster)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of a pipe has gone; Python would flush the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO
    except KubectlError as error:
        sys.stderr.write(f"kubectl podgate: {error}\n")
        return NO
    except KeyboardInterrupt:
        return INTERRUPTED


def complete(words: Sequence[str], kubectl: str = "kubectl") -> int:
    """Print candidates for the last word, for kubectl's own completion."""

    def cluster() -> Cluster:
        return Cluster([kubectl], namespace="podgate", timeout_seconds=_COMPLETION_SECONDS)

    sys.stdout.write(completion.answer(parser(), words, cluster))
    return 0


def _namespace(arguments: argparse.Namespace) -> str:
    """The one whose pods the command is about, or empty."""
    found = getattr(arguments, "namespace", None)
    pod = str(getattr(arguments, "pod", None) or "")
    if not found and "/" in pod:
        return pod.partition("/")[0]
    if isinstance(found, list):
        return str(found[0]) if len(found) == 1 else ""
    return found or ""


if __name__ == "__main__":
    sys.exit(main())
