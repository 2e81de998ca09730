"""etcd and an API server alone, in the test's node: for definitions, admission and the like."""

import contextlib
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator

from agent.lab.lab import NODE_IPV4
from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.cluster.control_plane import ControlPlane
from tests.conftest import fresh_lab


@contextlib.contextmanager
def running(binaries: pathlib.Path, directory: pathlib.Path) -> Iterator[ControlPlane]:
    """Start both; a process ends them when this one ends, however that ends."""
    cgroup2 = cgroup2_mount()
    assert cgroup2 is not None, "cgroup v2 is not mounted"
    name = f"podgate-test-{uuid.uuid4().hex[:12]}"
    (cgroup2 / name).mkdir()
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.reaper", name],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert reaper.stdin is not None
    try:
        with fresh_lab():
            made = ControlPlane(binaries, directory, cgroup2 / name, str(NODE_IPV4))
            try:
                made.etcd.start()
                made.api_server.start()
                made.wait_until_ready()
                yield made
            finally:
                made.api.close()
                made.api_server.stop()
                made.etcd.stop()
    finally:
        reaper.stdin.close()
        assert reaper.wait(2 * polling.PATIENCE_SECONDS) == 0, "processes of it are left"
