"""Network namespaces of the tests' own, which end with the test process whatever happens."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from probes import netns

V4 = "198.18.0.1"
V6 = "fd00:18::1"


@dataclass(frozen=True)
class Sandbox:
    """A namespace with only `lo`, up, with one address of each family."""

    netns: netns.Netns
    pid: int
    v4: str = V4
    v6: str = V6

    @property
    def path(self) -> str:
        return self.netns.path


@contextmanager
def sandbox_netns() -> Iterator[Sandbox]:
    """Hold a new anonymous namespace with one process.

    The process reads a pipe that closes with ours, even when we are killed:
    then it ends, and the kernel frees the namespace.
    """
    script = (
        "ip link set lo up"
        f" && ip address add {V4}/32 dev lo && ip address add {V6}/128 dev lo nodad"
        " && echo ready && exec cat"
    )
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"ready\n"
        yield Sandbox(netns.Netns.open(f"/proc/{holder.pid}/ns/net"), holder.pid)
    finally:
        holder.stdin.close()
        holder.wait(timeout=10)
        holder.stdout.close()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with sandbox_netns() as made:
        yield made


@pytest.fixture(scope="module")
def shared_sandbox() -> Iterator[Sandbox]:
    with sandbox_netns() as made:
        yield made
