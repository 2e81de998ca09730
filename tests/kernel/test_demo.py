"""The demo shows all acts in a terminal, and leaves nothing behind, however it ends."""

import contextlib
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import IO

import pytest

from agent.lab import leftovers
from agent.linux.cgroups import cgroup2_mount
from bpf import errors, program_specs, syscalls
from probes.netns import Netns, netns_cookie
from tests.kernel import offers
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

# Process teardown, RCU and the namespaces' work queue.
PATIENCE_SECONDS = 60
# The kernel removes a namespace some time after its last process; then its number is free.
MANY = 1000


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


def test_story_fits_a_terminal_of_80_columns(isolated: None) -> None:
    """All six acts with their facts, podgate's own screens as evidence, and what to do next."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        env=os.environ | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = read_to_end(ours)
    assert process.wait(PATIENCE_SECONDS) == 0, shown
    for number, name in enumerate(("open", "audit", "enforce", "strict", "failure", "clean-up"), 1):
        assert f"✓ {number} {name}" in shown
    offered = ("kubelet by the relay", "after 15 s")
    facts = offered if netns_cookie() is not None else ("strict needs Linux 5.14",)
    for fact in ("packet socket arrives", "host dropped", "without agent", *facts):
        assert fact in shown
    assert "demo/web" in shown[shown.index("$ podgate drops") :]
    assert "$ podgate status" in shown
    assert "checks passed." in shown
    assert "podgate doctor" in shown


def read_to_end(terminal: int) -> str:
    """What was written to a terminal until its last process closed it, without escape sequences."""
    content = b""
    # Linux: EIO at the end.
    with contextlib.suppress(OSError):
        while chunk := os.read(terminal, 65536):
            content += chunk
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content.decode(errors="replace"))


def test_new_namespace_with_the_number_of_a_removed_one_is_not_left(isolated: None) -> None:
    """The kernel gives the inode of a removed namespace to a later one."""
    offers.need_netns_cookie()
    cookies: dict[int, int | None] = {}
    for _ in range(MANY):
        with namespace_of_a_process() as netns:
            if netns.inode in cookies:
                assert leftovers.remaining_namespaces(cookies) == set()
                assert leftovers.remaining_namespaces({netns.inode: netns.cookie()}) == {
                    netns.inode
                }
                return
            cookies[netns.inode] = netns.cookie()
    pytest.fail("no inode was used again")


@contextlib.contextmanager
def namespace_of_a_process() -> Iterator[Netns]:
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield Netns.open(f"/proc/{process.pid}/ns/net")
    finally:
        process.kill()
        process.communicate()


def wait_for_line(stream: IO[str], words: str) -> None:
    for line in stream:
        if words in line:
            return
    pytest.fail(f"the demo ended before {words!r}")


def descendants(pid: int) -> set[int]:
    found = set()
    for children in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found |= {child} | descendants(child)
    return found


def runs_stage(pid: int) -> bool:
    try:
        arguments = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"agent.operate.demo.stage" in arguments


def gates_held_by(pids: set[int]) -> set[int]:
    """Ids of the gate programs to which these processes have a descriptor."""
    found = set()
    for pid in pids:
        for path in pathlib.Path(f"/proc/{pid}/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                if program := re.search(r"^prog_id:\s+(\d+)", path.read_text(), re.MULTILINE):
                    found.add(int(program[1]))
    return {program for program in found if program_name(program) == program_specs.GATE_EGRESS}


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
    mount = cgroup2_mount()
    assert mount is not None
    demo: subprocess.Popen[str] = request.getfixturevalue("demo")
    processes = descendants(demo.pid)
    assert any(map(runs_stage, processes))
    assert_mounts_are_held_outside(processes)
    programs = gates_held_by(processes)
    assert programs
    cgroup = mount / f"podgate-demo-{demo.pid}"
    assert cgroup.is_dir()
    demo.send_signal(number)
    assert demo.wait(PATIENCE_SECONDS) != 0
    wait_until("no stage runs", lambda: not any(map(runs_stage, processes)))
    wait_until("no program is left", lambda: not any(map(program_name, programs)))
    wait_until("no cgroup is left", lambda: not cgroup.exists())


def assert_mounts_are_held_outside(processes: set[int]) -> None:
    """A process of the stage's PID namespace must not be the last with its mounts: see
    agent/operate/demo/supervisor.py."""
    inner = max(filter(runs_stage, processes))
    outer = max(pid for pid in processes if inner in descendants(pid))
    pid_namespaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in (inner, outer)}
    mount_namespaces = {os.readlink(f"/proc/{pid}/ns/mnt") for pid in (inner, outer)}
    assert (len(pid_namespaces), len(mount_namespaces)) == (2, 1)


def test_killed_stage_is_a_failed_check(demo: "subprocess.Popen[str]") -> None:
    inner = max(filter(runs_stage, descendants(demo.pid)))
    os.kill(inner, signal.SIGKILL)
    output, _ = demo.communicate(timeout=PATIENCE_SECONDS)
    assert demo.returncode == 1
    assert "checks failed" in output
