"""A probe ends its connection with a FIN, does not wait and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from probes.protocols import dialing
from probes.results import ProbeResult
from probes.spec.definitions import HttpGet, TcpSocket
from tests.polling import PATIENCE_SECONDS
from tests.probes import servers
from tests.probes.conftest import Sandbox
from tests.probes.single_probe import OK, run_probe, waited_seconds

pytestmark = pytest.mark.kernel


@contextmanager
def nothing_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_cancelled_probe_leaves_nothing_behind(shared_sandbox: Sandbox) -> None:
    # The kernel accepts the connection, no process answers.
    with shared_sandbox.listen() as sock, nothing_left():
        task = asyncio.create_task(run_probe(shared_sandbox, HttpGet(sock.getsockname()[1])))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def sandbox_that_drops_every_fin(sandbox: Sandbox) -> Sandbox:
    rules = (
        "add table inet t; add chain inet t c { type filter hook input priority 0; };"
        " add rule inet t c tcp flags & fin == fin drop"
    )
    subprocess.run(["nsenter", f"--net={sandbox.path}", "nft", rules], check=True)
    return sandbox


async def test_closing_never_waits_for_the_pod(sandbox_that_drops_every_fin: Sandbox) -> None:
    """With SO_LINGER left on, close() would block the loop for a second: this thread would sleep,
    and not wait for a CPU."""
    sandbox = sandbox_that_drops_every_fin
    with sandbox.listen() as sock:
        started, waited = time.monotonic(), waited_seconds()
        outcome = await run_probe(sandbox, TcpSocket(sock.getsockname()[1]))
        assert time.monotonic() - started - (waited_seconds() - waited) < 0.9
    assert outcome.result is ProbeResult.SUCCESS


def in_state(sandbox: Sandbox, state: str) -> list[str]:
    command = ["nsenter", f"--net={sandbox.path}", "ss", "-Htan", "state", state]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


async def test_probe_leaves_no_port_in_time_wait(sandbox: Sandbox) -> None:
    """Else 470 probes a second use up all ports of a pod, and each connect() searches longer."""
    with sandbox.listen() as sock:
        outcome = await run_probe(sandbox, TcpSocket(sock.getsockname()[1]))
        # connect() returns before the kernel has handled its last ACK.
        sock.settimeout(PATIENCE_SECONDS)
        accepted, _ = sock.accept()
        with accepted:
            accepted.settimeout(PATIENCE_SECONDS)
            assert accepted.recv(1) == b""  # an end, and not a reset
    assert outcome.result is ProbeResult.SUCCESS
    assert in_state(sandbox, "time-wait") == []


@pytest.mark.parametrize("address", ["198.18.0.1", "fd00:18::1"])
def test_server_that_ends_at_that_very_moment_leaves_no_time_wait(
    sandbox: Sandbox, address: str
) -> None:
    class Watched(socket.socket):
        """The server's end comes between shutdown() and close()."""

        def shutdown(self, how: int) -> None:
            super().shutdown(how)
            assert accepted.recv(1) == b""
            accepted.close()

    with sandbox.listen(address) as listener:
        made = sandbox.netns.socket(listener.family, socket.SOCK_STREAM)
        made.setblocking(True)
        made.connect(listener.getsockname())
        listener.settimeout(PATIENCE_SECONDS)
        accepted, _ = listener.accept()
        accepted.settimeout(PATIENCE_SECONDS)
        dialing._finish(Watched(fileno=made.detach()), listener.family, b"")
    assert in_state(sandbox, "time-wait") == []


async def test_end_of_a_tcp_probe_carries_the_handshakes_last_acknowledgement(
    sandbox: Sandbox,
) -> None:
    def nft(*words: str) -> str:
        command = ["nsenter", f"--net={sandbox.path}", "nft", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    with sandbox.listen() as sock:
        port = sock.getsockname()[1]
        nft(
            "add table inet t; add chain inet t c { type filter hook output priority 0; };"
            f" add rule inet t c tcp dport {port} tcp flags == fin | ack counter;"
            f" add rule inet t c tcp dport {port} tcp flags == ack counter"
        )
        await run_probe(sandbox, TcpSocket(port))
        ends, bare = re.findall(r"packets (\d+)", nft("list", "chain", "inet", "t", "c"))
    assert (ends, bare) == ("1", "0")


def leave_twenty_ports(sandbox: Sandbox) -> None:
    # /proc/sys/net is the reader's own namespace's.
    words = ["sh", "-c", "echo 40000 40019 > /proc/sys/net/ipv4/ip_local_port_range"]
    subprocess.run(["nsenter", f"--net={sandbox.path}", *words], check=True)


@pytest.mark.parametrize("server_ends_first", [True, False])
async def test_probes_in_a_row_never_run_out_of_ports(
    sandbox: Sandbox, server_ends_first: bool
) -> None:
    """A server that ends first keeps its own end waiting, which holds no port of the probes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        if server_ends_first:
            writer.close()
            await writer.wait_closed()
        else:
            await reader.read()

    leave_twenty_ports(sandbox)
    async with servers.serving(sandbox.listen(port=8080), answer) as port:
        for _ in range(100):
            outcome = await run_probe(sandbox, HttpGet(port))
            assert outcome.result is ProbeResult.SUCCESS, outcome


async def test_server_that_probes_are_talking_to_sees_an_end_not_a_reset(
    sandbox: Sandbox,
) -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        seen.put_nowait(await reader.read())

    async with servers.serving(sandbox.listen(), answer) as port:
        outcome = await run_probe(sandbox, HttpGet(port))
        assert await asyncio.wait_for(seen.get(), 10) == b""
    assert outcome.result is ProbeResult.SUCCESS
