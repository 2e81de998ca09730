"""Network namespaces of the tests' own, which end with the test process whatever happens."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from probes import netns
from tests.nodes import leftovers
from tests.probes.engine.schedules import Bench

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

    def listen(self, address: str | None = None, port: int = 0, backlog: int = 64) -> socket.socket:
        """A listening socket inside, on any free port by default."""
        address = address or self.v4
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = self.netns.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(backlog)
        return sock

    def closed_port(self, address: str | None = None) -> int:
        """A port without a listener, which no process gets by chance: it is a low one."""
        return 9


@contextmanager
def sandbox_netns() -> Iterator[Sandbox]:
    """Hold a new anonymous namespace with one process.

    The process reads a pipe that closes with ours, even when we are killed:
    then it ends, and the kernel frees the namespace.
    """
    script = (
        "ip link set lo up"
        f" && ip address add {V4}/32 dev lo && ip address add {V6}/128 dev lo nodad"
        # The kernel adds the route to an IPv6 address a moment after the address.
        f" && until ip route get {V6} | grep -q ^local; do :; done"
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


@pytest.fixture(scope="session", autouse=True)
def _no_stray_event_loop() -> None:
    """Before Python 3.12 asyncio creates a loop at the first request, as pytest-asyncio does in
    a session that begins with a synchronous test; no code would close it. Not after this.
    """
    asyncio.set_event_loop(None)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with sandbox_netns() as made:
        yield made


@pytest.fixture(scope="module")
def shared_sandbox() -> Iterator[Sandbox]:
    with leftovers.lasting(), sandbox_netns() as made:
        yield made


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.scheduler.aclose()
