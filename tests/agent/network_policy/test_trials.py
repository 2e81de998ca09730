"""What the flows of one direction show, by which packets arrive and when. Fake time."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from agent.network_policy import trials
from agent.network_policy.arrivals import Sent
from agent.network_policy.checks import Checks, Flow
from agent.network_policy.objects import Direction
from agent.network_policy.trials import Place, Trial
from bpf.abi import IPAddress
from probes.netns import Netns

pytestmark = pytest.mark.looptime
POD = Place(Netns("/run/netns/web", 4, 1), ipaddress.ip_address("198.18.0.3"))
WITNESS = Place(Netns("/run/netns/witness", 4, 2), ipaddress.ip_address("198.18.0.9"))
DROPPED, ADMITTED = Flow("TCP", 9), Flow("UDP", 8)
LOST = 1000.0


class Wire:
    """Packets on their way: when they arrive, in seconds after they were sent, in this order."""

    def __init__(self) -> None:
        self.delays: dict[Flow, list[float]] = {}
        self.sent: list[tuple[float, Flow]] = []
        """When each was sent, from then on that it is open."""
        self.ends: list[tuple[tuple[Netns, IPAddress], ...]] = []
        """Source and destination."""
        self.closed = 0
        self.error: Exception | None = None
        self._arrived: set[Sent] = set()
        self._readable, self._wake = socket.socketpair()
        self._readable.setblocking(False)
        self._opened = 0.0

    def open(self, *ends: tuple[Netns, IPAddress]) -> "Wire":
        self.ends.append(ends)
        self._opened = asyncio.get_running_loop().time()
        return self

    def fileno(self) -> int:
        return self._readable.fileno()

    def send(self, flow: Flow) -> Sent:
        if self.error:
            raise self.error
        loop = asyncio.get_running_loop()
        self.sent.append((round(loop.time() - self._opened, 3), flow))
        sent = Sent(6, (len(self.sent), flow.port))
        if delays := self.delays.get(flow):
            loop.call_later(delays.pop(0), self._arrive, sent)
        return sent

    def _arrive(self, sent: Sent) -> None:
        self._arrived.add(sent)
        if not self.closed:
            self._wake.send(b"x")

    def has(self, sent: Sent) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._readable.recv(100)
        return sent in self._arrived

    def close(self) -> None:
        self.closed += 1
        self._readable.close()
        self._wake.close()


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    made = Wire()
    monkeypatch.setattr(trials, "Arrivals", made.open)
    yield made
    made.close()


def checks(dropped: Flow | None, admitted: Flow | None, direction: Direction = "Ingress") -> Checks:
    return Checks(direction, ("shop/p",), dropped, admitted)


BOTH = "ingress from the witness: TCP 9 is dropped, UDP 8 arrives"
LEAK = "ingress from the witness: TCP 9 arrives, though shop/p drops it"
BLOCKED = "ingress from the witness: UDP 8 does not arrive, though shop/p admits it"


@pytest.mark.parametrize(
    ("dropped", "admitted", "expected", "seconds"),
    [
        pytest.param(LOST, 0.1, Trial(True, BOTH), 0.15, id="as the policies are"),
        pytest.param(LOST, 1.15, Trial(True, BOTH), 1.2, id="a neighbour is resolved first"),
        pytest.param(0.05, 0.1, Trial(False, LEAK), 0.1, id="it arrives before"),
        pytest.param(0.13, 0.1, Trial(False, LEAK), 0.13, id="it is a little late"),
        pytest.param(0.17, 0.1, Trial(True, BOTH), 0.15, id="it is too late"),
        pytest.param(LOST, LOST, Trial(False, BLOCKED), 1.25, id="nothing arrives"),
        pytest.param(0.1, LOST, Trial(False, LEAK), 1.2, id="the wrong one arrives"),
    ],
)
async def test_both_flows_show_whether_the_policies_are_in_force(
    wire: Wire, dropped: float, admitted: float, expected: Trial, seconds: float
) -> None:
    wire.delays = {DROPPED: [dropped], ADMITTED: [admitted]}
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert await trials.run(checks(DROPPED, ADMITTED), POD, WITNESS) == expected
    assert loop.time() - started == pytest.approx(seconds, abs=0.01)
    assert wire.sent == [(0.0, DROPPED), (0.0, ADMITTED)]
    ends = ((WITNESS.netns, WITNESS.address), (POD.netns, POD.address))
    assert (wire.ends, wire.closed) == ([ends], 1)


async def test_egress_is_from_the_pod_to_the_witness(wire: Wire) -> None:
    wire.delays = {ADMITTED: [0.0]}
    found = await trials.run(checks(DROPPED, ADMITTED, "Egress"), POD, WITNESS)
    assert found == Trial(True, "egress to the witness: TCP 9 is dropped, UDP 8 arrives")
    assert wire.ends == [((POD.netns, POD.address), (WITNESS.netns, WITNESS.address))]


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (0.1, Trial(True, "ingress from the witness: UDP 8 arrives")),
        (LOST, Trial(False, BLOCKED)),
    ],
)
async def test_where_nothing_is_dropped_the_admitted_flow_alone_decides(
    wire: Wire, delay: float, expected: Trial
) -> None:
    wire.delays = {ADMITTED: [delay]}
    assert await trials.run(checks(None, ADMITTED), POD, WITNESS) == expected
    assert wire.sent == [(0.0, ADMITTED)]


SILENT = Trial(True, "ingress from the witness: TCP 9 is dropped")


@pytest.mark.parametrize(
    ("delays", "expected", "times"),
    [
        pytest.param([LOST] * 3, SILENT, [0.0, 0.2, 0.4], id="silence"),
        pytest.param([0.1], Trial(False, LEAK), [0.0], id="the first arrives"),
        pytest.param([0.3, LOST], Trial(False, LEAK), [0.0, 0.2], id="the first arrives late"),
        pytest.param([LOST, LOST, 0.1], Trial(False, LEAK), [0.0, 0.2, 0.4], id="the last arrives"),
        pytest.param([LOST, LOST, 0.3], SILENT, [0.0, 0.2, 0.4], id="the last is too late"),
    ],
)
async def test_where_nothing_is_admitted_silence_is_tried_several_times(
    wire: Wire, delays: list[float], expected: Trial, times: list[float]
) -> None:
    wire.delays = {DROPPED: delays}
    assert await trials.run(checks(DROPPED, None), POD, WITNESS) == expected
    assert wire.sent == [(at, DROPPED) for at in times]
    assert wire.closed == 1


async def test_nothing_is_sent_where_nothing_would_show(wire: Wire) -> None:
    text = "ingress from the witness: policies leave nothing that would show whether they apply"
    assert await trials.run(checks(None, None), POD, WITNESS) == Trial(True, text)
    assert (wire.ends, wire.sent) == ([], [])


@pytest.mark.parametrize(
    ("names", "by"), [(("shop/p",), "shop/p"), (("a/p", "a/q", "a/r"), "a/p (of 3)")]
)
async def test_first_policy_is_named_and_how_many_there_are(
    wire: Wire, names: tuple[str, ...], by: str
) -> None:
    found = await trials.run(Checks("Ingress", names, None, ADMITTED), POD, WITNESS)
    assert found.text == f"ingress from the witness: UDP 8 does not arrive, though {by} admits it"


@pytest.mark.parametrize("flows", [(DROPPED, ADMITTED), (DROPPED, None), (None, ADMITTED)])
async def test_sockets_are_closed_after_an_error(wire: Wire, flows: Any) -> None:
    wire.error = OSError(24, "Too many open files")
    with pytest.raises(OSError, match="Too many open files"):
        await trials.run(checks(*flows), POD, WITNESS)
    assert wire.closed == 1
