"""The demo leaves nothing behind, however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from agent.linux.cgroups import cgroup2_mount
from bpf import abi, errors, syscalls
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

# Process teardown, RCU and the namespaces' work queue.
PATIENCE_SECONDS = 60


@pytest.fixture
def demo(isolated: None) -> Iterator["subprocess.Popen[str]"]:
    """A running demo that has gated its pods."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    wait_for_line(process.stdout, "switching every pod to enforce")
    yield process
    process.kill()
    process.communicate()


def wait_for_line(stream: IO[str], words: str) -> None:
    for line in stream:
        if words in line:
            return
    pytest.fail(f"the demo ended before {words!r}")


def stages() -> set[int]:
    """Pids of all processes that run the stage."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                with open(f"/proc/{entry.name}/cmdline", "rb") as file:
                    arguments = file.read().split(b"\0")
            except OSError:
                continue
            if b"agent.demo.stage" in arguments:
                found.add(int(entry.name))
    return found


def programs() -> set[int]:
    """Ids of all gate programs of the kernel."""
    found = set()
    program_id = syscalls.next_id(syscalls.Command.PROG_GET_NEXT_ID, 0)
    while program_id is not None:
        if program_name(program_id) == abi.GATE_EGRESS:
            found.add(program_id)
        program_id = syscalls.next_id(syscalls.Command.PROG_GET_NEXT_ID, program_id)
    return found


def program_name(program_id: int) -> str:
    """The name in `struct bpf_prog_info`, at byte 64; empty for a program that has just gone."""
    try:
        fd = syscalls.fd_by_id(syscalls.Command.PROG_GET_FD_BY_ID, program_id)
    except errors.BpfError:
        return ""
    try:
        return syscalls.object_info(fd, 80)[64:].rstrip(b"\0").decode()
    finally:
        os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_demo_leaves_nothing(
    isolated: None, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    before = programs()
    mount = cgroup2_mount()
    assert mount is not None
    demo: subprocess.Popen[str] = request.getfixturevalue("demo")
    assert stages()
    assert programs() - before
    cgroup = mount / f"podgate-demo-{demo.pid}"
    assert cgroup.is_dir()
    demo.send_signal(number)
    assert demo.wait(PATIENCE_SECONDS) != 0
    wait_until("no stage runs", lambda: not stages())
    wait_until("no program is left", lambda: not programs() - before)
    wait_until("no cgroup is left", lambda: not cgroup.exists())


def test_killed_stage_is_a_failed_check(demo: "subprocess.Popen[str]") -> None:
    inner = max(stages())
    os.kill(inner, signal.SIGKILL)
    output, _ = demo.communicate(timeout=PATIENCE_SECONDS)
    assert demo.returncode == 1
    assert "checks failed" in output
