"""Probes against real servers, friendly and hostile, in a network namespace of their own."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from aiohttp import web

from probes.engine import prober
from probes.protocols import dialing
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.specs import Exec, HttpGet, Probe, TcpSocket
from tests.probes import servers
from tests.probes.conftest import Sandbox, sandbox_netns
from tests.probes.single_probe import OK, SHORT, Deadline, run_probe

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("address", ["198.18.0.1", "fd00:18::1"])
async def test_tcp_probe_of_a_listener_succeeds(shared_sandbox: Sandbox, address: str) -> None:
    with shared_sandbox.listen(address) as sock:
        outcome = await run_probe(shared_sandbox, TcpSocket(sock.getsockname()[1]), address)
    assert (outcome.result, outcome.message, outcome.address) == (ProbeResult.SUCCESS, "", address)


async def test_tcp_probe_of_a_closed_port_fails_at_once(shared_sandbox: Sandbox) -> None:
    outcome = await run_probe(shared_sandbox, TcpSocket(9))
    assert outcome.result is ProbeResult.FAILURE
    assert outcome.message == "dial tcp 198.18.0.1:9: connect: connection refused"
    assert not outcome.error


async def test_localhost_only_server_is_not_reached(shared_sandbox: Sandbox) -> None:
    with shared_sandbox.listen("127.0.0.1") as sock:
        outcome = await run_probe(shared_sandbox, TcpSocket(sock.getsockname()[1]))
    assert outcome.result is ProbeResult.FAILURE


async def test_server_of_the_node_is_not_reached(shared_sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        outcome = await run_probe(shared_sandbox, TcpSocket(sock.getsockname()[1]), "127.0.0.1")
    assert outcome.result is ProbeResult.FAILURE


async def test_tcp_probe_without_an_answer_times_out(sandbox: Sandbox) -> None:
    with (
        sandbox.listen(backlog=0) as sock,
        servers.full_backlog(
            sock, lambda: sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM)
        ),
    ):
        port = sock.getsockname()[1]
        deadline = Deadline()
        outcome = await run_probe(sandbox, TcpSocket(port), seconds=SHORT)
    assert outcome.message == f"dial tcp 198.18.0.1:{port}: i/o timeout"
    assert outcome.duration_seconds >= SHORT
    assert deadline.is_kept(outcome)


async def test_unreachable_address_is_a_failure(shared_sandbox: Sandbox) -> None:
    outcome = await run_probe(shared_sandbox, TcpSocket(80), "198.18.99.99")
    assert outcome.message == "dial tcp 198.18.99.99:80: connect: network is unreachable"
    assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, False)


async def test_two_pods_with_the_same_address_are_distinguished() -> None:
    with sandbox_netns() as first, sandbox_netns() as second, first.listen() as sock:
        handler = TcpSocket(sock.getsockname()[1])
        outcomes = await asyncio.gather(run_probe(first, handler), run_probe(second, handler))
    assert [outcome.result for outcome in outcomes] == [ProbeResult.SUCCESS, ProbeResult.FAILURE]


async def test_namespace_that_is_gone_is_a_failure() -> None:
    with sandbox_netns() as sandbox:
        pass
    outcome = await run_probe(sandbox, TcpSocket(80))
    assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, False)
    assert "is gone" in outcome.message


async def test_namespace_that_goes_during_a_probe_is_a_failure() -> None:
    with sandbox_netns() as sandbox:
        async with servers.serving(sandbox.listen(), servers.silent) as port:
            probe = asyncio.create_task(run_probe(sandbox, HttpGet(port), seconds=SHORT))
            await asyncio.sleep(0)
    assert (await probe).result is ProbeResult.FAILURE


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


async def test_lack_of_descriptors_is_a_prober_error_not_the_pods(
    shared_sandbox: Sandbox,
) -> None:
    loop = asyncio.get_running_loop()
    running = prober.Prober(loop)
    seen: list[ProbeOutcome] = []
    plan = prober.plan(Probe(TcpSocket(80)), [shared_sandbox.v4])
    with no_descriptors_left():
        running.start(plan, shared_sandbox.netns, seen.append)
    running.close()
    assert [(outcome.result, outcome.error) for outcome in seen] == [(ProbeResult.UNKNOWN, True)]


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EIO])
async def test_error_of_the_machine_is_a_prober_error_not_the_pods(
    shared_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(dialing, "connect_inside", lambda sock, address: number)
    outcome = await run_probe(shared_sandbox, TcpSocket(80))
    assert (outcome.result, outcome.error) == (ProbeResult.UNKNOWN, True)


async def test_exec_is_the_kubelets(shared_sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="run by the kubelet"):
        await run_probe(shared_sandbox, Exec(("true",)))


@pytest.mark.parametrize("addresses", [(), ("fe80::1",), ("169.254.1.1", "fe80::1%lo")])
async def test_pod_without_an_address_fails(
    shared_sandbox: Sandbox, addresses: tuple[str, ...]
) -> None:
    outcome = await prober.probe(
        Probe(TcpSocket(80)), netns=shared_sandbox.netns, addresses=addresses
    )
    assert (outcome.result, outcome.message) == (
        ProbeResult.FAILURE,
        "the pod has no address to probe",
    )


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
async def test_timeout_must_be_positive(shared_sandbox: Sandbox, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        await run_probe(shared_sandbox, TcpSocket(80), seconds=seconds)


async def test_http_probe_of_a_real_server(shared_sandbox: Sandbox) -> None:
    seen: list[tuple[str, dict[str, str]]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.path_qs, dict(request.headers)))
        return web.Response(text="fine")

    app = web.Application()
    app.router.add_get("/healthz", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    sock = shared_sandbox.listen()
    await web.SockSite(runner, sock).start()
    port = sock.getsockname()[1]
    try:
        outcome = await run_probe(shared_sandbox, HttpGet(port, "/healthz?a=b"))
    finally:
        await runner.cleanup()
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "fine")
    assert seen == [
        (
            "/healthz?a=b",
            {
                "Host": f"198.18.0.1:{port}",
                "User-Agent": "kube-probe/1.36",
                "Accept": "*/*",
                "Connection": "close",
            },
        )
    ]


async def test_redirect_to_another_port_of_the_pod_is_followed(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), servers.saying(OK)) as second:
        there = f"http://{shared_sandbox.v4}:{second}/".encode()
        moved = b"HTTP/1.1 302 F\r\nLocation: " + there + b"\r\nContent-Length: 0\r\n\r\n"
        async with servers.serving(shared_sandbox.listen(), servers.saying(moved)) as first:
            outcome = await run_probe(shared_sandbox, HttpGet(first))
    assert (outcome.result, outcome.message) == (ProbeResult.SUCCESS, "ok")


async def test_endless_redirects_end(shared_sandbox: Sandbox) -> None:
    moved = b"HTTP/1.1 302 F\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n"
    async with servers.serving(shared_sandbox.listen(), servers.saying(moved)) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port))
    assert outcome.result is ProbeResult.FAILURE
    assert "stopped after 10 redirects" in outcome.message


async def test_all_redirects_share_one_timeout(shared_sandbox: Sandbox) -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(SHORT / 4)
        writer.write(b"HTTP/1.1 302 F\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with servers.serving(shared_sandbox.listen(), slow) as port:
        deadline = Deadline()
        outcome = await run_probe(shared_sandbox, HttpGet(port), seconds=SHORT)
    assert outcome.message.endswith("(Client.Timeout exceeded while awaiting headers)")
    assert deadline.is_kept(outcome)


async def test_no_proxy_is_ever_used(
    shared_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://198.18.0.1:9")
    async with servers.serving(shared_sandbox.listen(), servers.saying(OK)) as port:
        assert (await run_probe(shared_sandbox, HttpGet(port))).passed


@pytest.mark.parametrize(
    ("answer", "words", "error"),
    [
        (servers.silent, "while awaiting headers", False),
        (servers.repeating(b"", b"H", 0.01), "while awaiting headers", False),
        (servers.repeating(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.01), "awaiting headers", False),
        (servers.repeating(OK[:-2], b"", 0.01), "while reading body", True),
    ],
)
async def test_server_that_drags_its_feet_is_cut_off(
    shared_sandbox: Sandbox, answer: servers.Answer, words: str, error: bool
) -> None:
    async with servers.serving(shared_sandbox.listen(), answer) as port:
        deadline = Deadline()
        outcome = await run_probe(shared_sandbox, HttpGet(port), seconds=SHORT)
    assert words in outcome.message
    assert (outcome.result, outcome.error) == (ProbeResult.FAILURE, error)
    assert deadline.is_kept(outcome)


@pytest.mark.parametrize(
    ("answer", "result", "words"),
    [
        (
            servers.repeating(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 1000),
            ProbeResult.FAILURE,
            "headers exceeded",
        ),
        (
            servers.repeating(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 65536),
            ProbeResult.FAILURE,
            "headers exceeded",
        ),
        (servers.repeating(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536), ProbeResult.SUCCESS, "xxx"),
        (
            servers.repeating(b"HTTP/1.1 103 E\r\n\r\n", b"HTTP/1.1 103 E\r\n\r\n"),
            ProbeResult.FAILURE,
            "too many 1xx",
        ),
    ],
)
async def test_flood_is_cut_off_within_a_megabyte(
    shared_sandbox: Sandbox, answer: servers.Answer, result: ProbeResult, words: str
) -> None:
    async with servers.serving(shared_sandbox.listen(), answer) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port))
    assert outcome.result is result
    assert words in outcome.message
    assert len(outcome.message) <= 10_240


async def test_flood_holds_little_memory(shared_sandbox: Sandbox) -> None:
    """One probe alone, so that what is counted is its own: the server is another process."""
    port = 8081
    code = (
        "import socket\n"
        f"s = socket.create_server(('{shared_sandbox.v4}', {port})); print('ready', flush=True)\n"
        "c, _ = s.accept()\n"
        "try:\n"
        "    c.sendall(b'HTTP/1.1 200 OK\\r\\nX: ')\n"
        "    while True: c.sendall(b'x' * 65536)\n"
        "except OSError: pass\n"
    )
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--net={shared_sandbox.path}", "python3", "-c", code),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    await run_probe(shared_sandbox, TcpSocket(9))  # what is loaded once is not counted
    tracemalloc.start()
    try:
        outcome = await run_probe(shared_sandbox, HttpGet(port))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    await process.wait()
    assert "headers exceeded" in outcome.message
    assert peak < 1_000_000


async def test_reset_is_a_failure(shared_sandbox: Sandbox) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with servers.serving(shared_sandbox.listen(), reset) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port))
    assert outcome.result is ProbeResult.FAILURE
    assert outcome.message.endswith("read: connection reset by peer")
    assert f"->198.18.0.1:{port}: read:" in outcome.message


async def test_half_close_without_an_answer_is_a_failure(shared_sandbox: Sandbox) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await reader.read()

    async with servers.serving(shared_sandbox.listen(), half) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port))
    assert outcome.message == f'Get "http://198.18.0.1:{port}/": EOF'


async def test_large_request_is_sent_in_pieces(shared_sandbox: Sandbox) -> None:
    async def measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = 0
        while not (data := await reader.read(65536)).endswith(b"\r\n\r\n"):
            size += len(data)
        text = str(size + len(data)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        await writer.drain()
        await reader.read()

    size = 8 * 1024 * 1024
    async with servers.serving(shared_sandbox.listen(), measure) as port:
        outcome = await run_probe(shared_sandbox, HttpGet(port, headers=(("X-A", "x" * size),)))
    assert int(outcome.message) > size


async def test_mistake_of_ours_ends_only_that_probe(
    shared_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: dialing.DialAttempt) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(dialing.DialAttempt, "_connected", broken)
    with shared_sandbox.listen() as sock:
        outcome = await run_probe(shared_sandbox, TcpSocket(sock.getsockname()[1]))
    assert (outcome.result, outcome.error) == (ProbeResult.UNKNOWN, True)
    assert "a mistake" in outcome.message


async def test_many_probes_at_once(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), servers.saying(OK)) as port:
        outcomes = await asyncio.gather(
            *(run_probe(shared_sandbox, HttpGet(port)) for _ in range(200))
        )
    assert {outcome.result for outcome in outcomes} == {ProbeResult.SUCCESS}


def test_errors_are_spelt_as_in_go() -> None:
    assert dialing._strerror(errno.ECONNREFUSED) == "connection refused"
