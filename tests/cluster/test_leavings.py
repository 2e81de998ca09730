"""The tests' own cluster leaves nothing behind, however the test ends."""

import contextlib
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster import kubelet
from tests.cluster.conftest import binaries
from tests.runtime import reaper

pytestmark = pytest.mark.kernel


@pytest.fixture
def proc(isolated: None, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The machine's: a cluster of these tests covers some files of /proc/sys."""
    subprocess.run(["mount", "-t", "proc", "proc", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_cluster_ends_with_the_test_and_changes_nothing_of_the_machine(
    proc: pathlib.Path, image: pathlib.Path, number: signal.Signals
) -> None:
    directory = binaries()
    before = _of_the_machine(proc)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.holding", str(directory), str(image)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as test:
        try:
            assert test.stdout is not None
            name = test.stdout.readline().strip()
            assert name
            programs = {path.name for path in map(_program, reaper.processes(name)) if path}
            # Of the last one are the pod's containers.
            runtime = "crio" if (directory / "crio").is_file() else "containerd"
            expected = {"kubelet", "kube-apiserver", "etcd", runtime, "busybox"}
            assert expected <= programs
            assert _of_the_machine(proc) == before
        finally:
            test.send_signal(number)
    polling.wait_until("all cgroups are gone", lambda: not reaper.cgroups(name))
    polling.wait_until("all processes are gone", lambda: not reaper.processes(name))
    assert _of_the_machine(proc) == before


def _of_the_machine(proc: pathlib.Path) -> dict[str, str]:
    """The sysctls that a kubelet sets."""
    return {name: (proc / "sys" / name).read_text() for name in kubelet.TUNABLES}


def _program(pid: int) -> pathlib.Path | None:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/exe").readlink()
    return None
