"""With two addresses one success is enough, and the second is dialled only when needed."""

from __future__ import annotations

import pytest

from probes.engine import prober
from probes.results import ProbeResult
from probes.spec.definitions import HttpGet, TcpSocket
from tests.polling import PATIENCE_SECONDS
from tests.probes import servers
from tests.probes.conftest import Sandbox
from tests.probes.single_probe import ILL, OK, SHORT, Deadline, run_probe

pytestmark = pytest.mark.kernel


async def test_second_family_answers_when_the_first_refuses(shared_sandbox: Sandbox) -> None:
    with shared_sandbox.listen(shared_sandbox.v6) as sock:
        outcome = await run_probe(
            shared_sandbox,
            TcpSocket(sock.getsockname()[1]),
            shared_sandbox.v4,
            shared_sandbox.v6,
        )
    assert (outcome.result, outcome.address) == (ProbeResult.SUCCESS, shared_sandbox.v6)


async def test_second_family_answers_when_the_first_is_ill(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), servers.saying(ILL)) as port:
        sock = shared_sandbox.listen(shared_sandbox.v6, port)
        async with servers.serving(sock, servers.saying(OK)):
            outcome = await run_probe(
                shared_sandbox, HttpGet(port), shared_sandbox.v4, shared_sandbox.v6
            )
    assert (outcome.result, outcome.address) == (ProbeResult.SUCCESS, shared_sandbox.v6)


async def test_second_family_joins_when_the_first_is_silent(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), servers.silent) as port:
        sock = shared_sandbox.listen(shared_sandbox.v6, port)
        async with servers.serving(sock, servers.saying(OK)):
            outcome = await run_probe(
                shared_sandbox,
                HttpGet(port),
                shared_sandbox.v4,
                shared_sandbox.v6,
                seconds=10.0,
            )
    assert (outcome.result, outcome.address) == (ProbeResult.SUCCESS, shared_sandbox.v6)
    assert outcome.duration_seconds >= prober.ATTEMPT_DELAY_SECONDS


async def test_healthy_pod_sees_one_request_a_probe(shared_sandbox: Sandbox) -> None:
    with shared_sandbox.listen() as first:
        port = first.getsockname()[1]
        with shared_sandbox.listen(shared_sandbox.v6, port) as second:
            await run_probe(shared_sandbox, TcpSocket(port), shared_sandbox.v4, shared_sandbox.v6)
            first.settimeout(PATIENCE_SECONDS)
            first.accept()[0].close()
            with pytest.raises(BlockingIOError):
                second.accept()


async def test_failures_of_both_families_are_both_reported(shared_sandbox: Sandbox) -> None:
    outcome = await run_probe(shared_sandbox, TcpSocket(9), shared_sandbox.v4, shared_sandbox.v6)
    assert outcome.message == (
        "dial tcp 198.18.0.1:9: connect: connection refused; "
        "dial tcp [fd00:18::1]:9: connect: connection refused"
    )
    assert outcome.address == shared_sandbox.v4


async def test_both_families_silent_end_at_one_deadline(shared_sandbox: Sandbox) -> None:
    async with servers.serving(shared_sandbox.listen(), servers.silent) as port:
        sock = shared_sandbox.listen(shared_sandbox.v6, port)
        async with servers.serving(sock, servers.silent):
            deadline = Deadline()
            outcome = await run_probe(
                shared_sandbox,
                HttpGet(port),
                shared_sandbox.v4,
                shared_sandbox.v6,
                seconds=SHORT,
            )
    assert outcome.result is ProbeResult.FAILURE
    assert outcome.duration_seconds >= SHORT
    assert deadline.is_kept(outcome)
