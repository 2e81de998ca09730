"""The tests' own runtime leaves nothing behind, however the test ends."""

import asyncio
import pathlib
import signal
import subprocess
import sys

import pytest

from tests import polling
from tests.conftest import fresh_lab
from tests.runtime import containerd, reaper
from tests.runtime.driving import Driver

pytestmark = pytest.mark.kernel


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

    # Orphans are there until process 1 has reaped them.
    polling.wait_until(
        "nothing left behind",
        lambda: not reaper.cgroups(name) and not any(reaper.has(pid, name) for pid in held),
    )


def test_namespaces_below_what_ip_netns_mounts_are_removed(isolated: None) -> None:
    """`ip netns add` mounts /run/netns on itself, with all mounts that are below it."""
    directory = pathlib.Path("/run/netns")
    before = _below(directory)
    with fresh_lab(), containerd.running(containerd.ptp()) as runtime:
        asyncio.run(_run_sandbox(runtime, "before"))
        subprocess.run(["ip", "netns", "add", "outside"], check=True)
        try:
            asyncio.run(_run_sandbox(runtime, "after"))
        finally:
            subprocess.run(["ip", "netns", "del", "outside"], check=True)
    assert not list(directory.glob("cni-*"))
    assert _below(directory) == before


def _below(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in containerd.mounts() if path.is_relative_to(directory)]


async def _run_sandbox(runtime: containerd.Containerd, name: str) -> None:
    async with Driver(runtime.socket, runtime.pods_cgroup, runtime.directory / "logs") as driver:
        await driver.run_sandbox(name)
