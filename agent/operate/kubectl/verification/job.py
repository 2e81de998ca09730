"""The run of the chart's CronJob: from a pod, by its service account.

It prints the report's summary and its JSON. Exit status: 0 in order, 1 a hole or a blocked kubelet,
2 some nodes were not tried.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from agent.operate.kubectl import printing
from agent.operate.kubectl.cluster import KubectlError
from agent.operate.kubectl.exit_status import NO
from agent.operate.kubectl.verification import reports, running
from agent.operate.kubectl.verification.access import Access, PodAccess
from agent.operate.kubectl.verification.node_run import POD
from agent.operate.kubectl.verification.running import Options

_NOT_TRIED = 2


def main(arguments: Sequence[str], access: Access | None = None) -> int:
    """access: for tests; else that of the pod's account."""
    parser = argparse.ArgumentParser(prog="python3 -m agent.operate.kubectl.verification.job")
    parser.add_argument("--podgate-namespace", required=True)
    parser.add_argument("--mode", action="append", choices=running.MODES)
    parser.add_argument("--samples", type=int, default=5)
    parsed = parser.parse_args(arguments)
    # The kubelet's way to end a Job at its deadline; the run then deletes its pods.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_NOT_TRIED))
    options = Options(
        namespace=parsed.podgate_namespace,
        modes=tuple(parsed.mode or running.MODES),
        samples=parsed.samples,
        origin=POD,
    )
    try:
        report = running.run(access or PodAccess(*server(os.environ)), options)
    except (KubectlError, OSError) as error:
        printing.progress(str(error))
        return _NOT_TRIED
    for sentence in report.sentences():
        printing.line(sentence)
    printing.line(json.dumps(reports.as_json(report)))
    if report.is_well:
        return 0
    return NO if report.with_verdict("HOLE", "kubelet blocked") else _NOT_TRIED


def server(environment: Mapping[str, str]) -> tuple[str, int]:
    """The API server's host and port, as client-go reads them. Raises `KubectlError`."""
    try:
        host, port = (environment[f"KUBERNETES_SERVICE_{name}"] for name in ("HOST", "PORT"))
    except KeyError as error:
        raise KubectlError(f"{error.args[0]} is not set; run it in a pod") from error
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
