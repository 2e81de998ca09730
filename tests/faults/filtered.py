"""An agent whose system calls can fail: `python -m tests.faults.filtered ARGUMENTS` is `podgate
ARGUMENTS` with a filter of `tests.faults.seccomp`.

It imports first: thousands of calls that need no answer.
"""

import gc
import sys

from kubernetes.aio import client, config  # noqa: F401  # of agents with a kubeconfig

from agent.app import http_server, pod_services, preflight, startup  # noqa: F401
from agent.linux import malloc, scheduling  # noqa: F401
from agent.operate.cli.commands import run  # noqa: F401
from agent.operate.cli.main import main
from tests.faults import seccomp, system_calls

if __name__ == "__main__":
    gc.collect()
    sys.argv[0] = "podgate"
    seccomp.install(system_calls.INTERCEPTED)
    main(prog_name="podgate")
