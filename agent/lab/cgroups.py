"""A cgroup for the demo's kubelet stub, which is removed however the demo ends."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

from agent.errors import PreflightError
from agent.linux.cgroups import cgroup2_mount

# The kernel needs up to 10 s to remove the processes of a deleted namespace from a cgroup.
_SWEEP = """
cat > /dev/null
for turn in $(seq 100); do
    rmdir "$0" 2> /dev/null
    test -d "$0" || exit
    sleep 0.1
done
"""


@contextlib.contextmanager
def own() -> Iterator[pathlib.Path]:
    """Its directory. Raises `PreflightError` without cgroup v2.

    A cgroup outlives its processes and belongs to no namespace. So a separate process removes it
    when its input ends: when this process exits, even if it is killed.
    """
    mount = cgroup2_mount()
    if mount is None:
        raise PreflightError("cgroup v2 is not mounted; mount it, as systemd does by itself.")
    directory = mount / f"podgate-demo-{os.getpid()}"
    sweeper = subprocess.Popen(
        ["sh", "-c", _SWEEP, str(directory)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        directory.mkdir()
        yield directory
    finally:
        sweeper.communicate()
