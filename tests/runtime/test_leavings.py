"""The tests' own runtime leaves nothing behind, however the test ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.runtime import reaper

pytestmark = pytest.mark.kernel

_PATIENCE_SECONDS = 30 * float(os.environ.get("PODGATE_TEST_PATIENCE", "1"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_runtime_and_its_containers_end_with_the_test(
    isolated: None, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.holding"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as test:
        try:
            assert test.stdout is not None
            name = test.stdout.readline().strip()
            assert name
            held = reaper.processes(name)
            # containerd, a shim, the sandbox' process and the container's
            assert len(held) >= 4
        finally:
            test.send_signal(number)

    deadline = time.monotonic() + _PATIENCE_SECONDS
    # Orphans are there until process 1 has reaped them.
    while left := (*reaper.cgroups(name), *(pid for pid in held if reaper.has(pid, name))):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
