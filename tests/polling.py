"""How long tests wait at most: one patience for all of them, by what this machine takes.

Waiting itself is of `agent.lab.polling`. Prefer an event where there is one (`AgentProcess.event`).
"""

import os
import subprocess
import sys
import time

from agent.lab.polling import (
    PATIENCE_VARIABLE,
    TimedOutError,
    patience_seconds,
    request_until,
    until,
    wait_until,
)

__all__ = ["TimedOutError", "request_until", "until", "wait_until"]

# A new interpreter that imports the agent is what nearly every kernel test waits for. It takes so
# many seconds where a minute is patience enough.
_STEP = "from agent.operate.cli.commands import run"
_STEP_SECONDS = 0.4


def _measure() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", _STEP], check=True)
    return max(1.0, (time.monotonic() - began) / _STEP_SECONDS)


# Measured once, by the first process of a run; its workers and all that they start inherit it.
if PATIENCE_VARIABLE not in os.environ:
    os.environ[PATIENCE_VARIABLE] = f"{_measure():.2f}"

PATIENCE = float(os.environ[PATIENCE_VARIABLE])
"""A multiple for what depends on the speed of the machine. What is tight takes its square."""
PATIENCE_SECONDS = patience_seconds()
