"""Short slices of a process, which starts others with the default; in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from agent.linux import scheduling
from tests.agent.linux import slices

_READ = """
import json, os, subprocess, sys
from agent.linux import scheduling
from tests.agent.linux import slices
# Whatever the tests run with.
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
os.nice(3)
if sys.argv[1] == "short":
    scheduling.shorten_slice()
command = [sys.executable, "-m", "tests.agent.linux.slices"]
child = subprocess.run(command, check=True, capture_output=True)
print(json.dumps([slices.slice_ns(), int(child.stdout), os.nice(0)]))
"""


def _read(how: str) -> tuple[int, int, int]:
    """Slices of a process and of its child, and its niceness."""
    command = [sys.executable, "-c", _READ, how]
    result = subprocess.run(command, check=True, capture_output=True, timeout=60)
    own, child, niceness = json.loads(result.stdout)
    return own, child, niceness


def test_process_has_short_slices_and_its_children_have_not() -> None:
    default, _, niceness = _read("usual")
    own, child, niceness_after = _read("short")
    if default:  # Linux 6.12; others know no slices
        assert (own, child) == (scheduling.SLICE_NS, default)
    lower = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
    assert niceness_after == niceness == lower


def test_unknown_machine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = slices.slice_ns()
    monkeypatch.setattr("platform.machine", lambda: "vax")
    scheduling.shorten_slice()
    monkeypatch.undo()
    assert slices.slice_ns() == before
