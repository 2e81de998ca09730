"""A cgroup for the demo's stand-in kubelet, which goes however the demo ends."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

from agent.errors import PreflightError
from agent.linux.cgroups import cgroup2_mount

# The kernel takes a moment to forget the processes of a namespace that has ended: up to 10 s.
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
    """Its directory. Raises `PreflightError` where there is no cgroup v2.

    A cgroup outlives its processes and belongs to no namespace that would end. So a process of its
    own removes it, which hears by the end of its input that this one is no more, even if killed.
    """
    mount = cgroup2_mount()
    if mount is None:
        raise PreflightError("cgroup v2 is not mounted; mount it, as systemd does by itself.")
    made = mount / f"podgate-demo-{os.getpid()}"
    sweeper = subprocess.Popen(
        ["sh", "-c", _SWEEP, str(made)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        made.mkdir()
        yield made
    finally:
        sweeper.communicate()
