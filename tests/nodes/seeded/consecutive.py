"""Tests that have nodes of their own and change their process, or leave it as it was, for
tests/nodes/test_units.py; not collected."""

import os
import pathlib
import signal
import threading

import pytest

from probes.netns import netns_cookie
from tests.nodes import node

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("own_node")]


def show() -> None:
    """The process, its node and its directory."""
    assert node.current is not None
    # The kernel uses numbers of inodes again, and cookies never.
    network = netns_cookie() or node.current.path
    cgroups = pathlib.Path("/proc/self/cgroup").read_text("ascii").splitlines()
    assert f"0::{node.current.path}/tests" in cgroups
    print("PROCESS", os.getpid(), node.current.path, network, os.getcwd())  # noqa: T201


def test_first() -> None:
    show()


def test_second() -> None:
    show()
    os.umask(0)


def test_after_another_umask() -> None:
    show()
    threading.Thread(target=signal.pause, daemon=True).start()


def test_after_a_thread() -> None:
    show()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def test_after_an_ignored_signal() -> None:
    show()
    os.chdir("/run")


def test_after_another_directory() -> None:
    show()
    pytest.fail("on purpose")


def test_after_a_failure() -> None:
    show()


def test_last() -> None:
    show()
