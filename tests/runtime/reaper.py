"""Ends a runtime and all its containers when the process that started them is gone.

`python -m tests.runtime.reaper NAME` reads its standard input to the end, which comes with the
writer's, however that ended; then it kills what is in the cgroup NAME of version 2 and removes all
cgroups of that name. Containers are not the test's children: shims see to that.
"""

import contextlib
import os
import pathlib
import signal
import sys
import time

from tests import polling

# Beside a load, killed processes wait for their turn to end, too.
_LIMIT_SECONDS = polling.PATIENCE_SECONDS
_CGROUPS = pathlib.Path("/sys/fs/cgroup")


def cgroups(name: str) -> list[pathlib.Path]:
    """All cgroups of this name, one of each hierarchy; the one of version 2 has cgroup.kill."""
    return [path for path in (_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")) if path.is_dir()]


def processes(name: str) -> list[int]:
    """Pids below the cgroups of this name, also of orphans that are not reaped yet."""
    return [
        int(entry.name)
        for entry in os.scandir("/proc")
        if entry.name.isdecimal() and has(int(entry.name), name)
    ]


def has(pid: int, name: str) -> bool:
    """Whether a process is below one of the cgroups of this name."""
    try:
        return f"/{name}/" in pathlib.Path("/proc", str(pid), "cgroup").read_text()
    except OSError:
        return False


def end(name: str) -> bool:
    """Kill and remove; whether nothing is left."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while found := cgroups(name):
        if time.monotonic() > deadline:
            return False
        for top in found:
            _kill(top)
            for path, _, _ in os.walk(top, topdown=False):
                # Busy until its processes are reaped.
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        time.sleep(0.02)
    return True


def _kill(top: pathlib.Path) -> None:
    if (top / "cgroup.kill").exists():
        (top / "cgroup.kill").write_text("1")
        return
    # A runtime that was killed may have left a container frozen (runc does while it signals); what
    # is frozen by version 1 survives SIGKILL.
    for state in top.rglob("freezer.state"):
        with contextlib.suppress(OSError):
            state.write_text("THAWED")
    for procs in top.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            for pid in procs.read_text().split():
                os.kill(int(pid), signal.SIGKILL)


def _leave_node() -> None:
    """The node of a test may end first, with all that is in its cgroup (tests/nodes)."""
    for root in (_CGROUPS, _CGROUPS / "unified"):
        if (root / "cgroup.procs").exists():
            (root / "cgroup.procs").write_text(str(os.getpid()))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _leave_node()
    sys.stdin.buffer.read()
    sys.exit(0 if end(sys.argv[1]) else 1)


if __name__ == "__main__":
    main()
