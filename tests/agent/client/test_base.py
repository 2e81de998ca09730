"""Streams of states over scripted calls: when a call is made again, and from where."""

import argparse
import inspect
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from agent.client import base, podinfo
from agent.client.base import StreamError
from agent.client.podinfo import API, AsyncPodInfoClient, PodInfoClient, PodInfoState
from agent.client.v1alpha1 import podinfo_pb2 as pb
from tests import polling

Client = PodInfoClient | AsyncPodInfoClient
Step = list[pb.WatchPodConditionsResponse | grpc.RpcError]
"""What one call gets; then its stream ends."""
FIRST, SECOND = PodInfoState(7, 1, ()), PodInfoState(7, 2, ())
INCOMPLETE = "cannot read the conditions of this node's pods: the response is incomplete"


class Failure(grpc.RpcError):  # type: ignore[misc]
    """As the calls of grpc raise it."""

    def __init__(self, code: grpc.StatusCode, details: str | None = None) -> None:
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


SILENT = Failure(grpc.StatusCode.DEADLINE_EXCEEDED)


class Server:
    """In place of a channel: responds to one call after the other. The last one does so always."""

    def __init__(self, *steps: Step) -> None:
        self._steps = list(steps)
        self.calls: list[Call] = []
        self.targets: list[str] = []
        self.is_closed = False

    @property
    def positions(self) -> list[tuple[int, int]]:
        return [(call.request.instance_id, call.request.rev) for call in self.calls]

    def open(self, target: str, options: object) -> Any:
        assert options == base.OPTIONS
        self.targets.append(target)
        return self

    def unary_stream(self, method: str, **_: object) -> Callable[..., "Call"]:
        assert method == "/podgate.podinfo.v1alpha1.PodInfo/WatchPodConditions"
        return self._start

    def _start(self, request: pb.WatchPodConditionsRequest, timeout: float) -> "Call":
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        self.calls.append(Call(request, timeout, step))
        return self.calls[-1]


class SyncServer(Server):
    def close(self) -> None:
        self.is_closed = True


class AsyncServer(Server):
    async def close(self) -> None:
        self.is_closed = True


class Call:
    """Of either kind of client."""

    def __init__(self, request: pb.WatchPodConditionsRequest, timeout: float, step: Step) -> None:
        self.request = request
        self.timeout = timeout
        self.is_cancelled = False
        self._items = iter(step)

    def __iter__(self) -> Iterator[pb.WatchPodConditionsResponse]:
        for item in self._items:
            if isinstance(item, grpc.RpcError):
                raise item
            yield item

    async def read(self) -> Any:
        return next(iter(self), grpc.aio.EOF)

    def cancel(self) -> None:
        self.is_cancelled = True


def response(state: PodInfoState) -> pb.WatchPodConditionsResponse:
    return pb.WatchPodConditionsResponse(instance_id=state.instance_id, rev=state.rev)


async def result(found: Any) -> Any:
    """Of a client of either kind."""
    return await found if inspect.isawaitable(found) else found


class Made:
    """A client of a scripted server, and the problems that it reported."""

    def __init__(
        self, kind: type[Client], patch: pytest.MonkeyPatch, *steps: Step, **options: Any
    ) -> None:
        self.server: Server = SyncServer(*steps) if kind is PodInfoClient else AsyncServer(*steps)
        patch.setattr(
            grpc if kind is PodInfoClient else grpc.aio, "insecure_channel", self.server.open
        )
        self.problems: list[str] = []
        self.client = kind(on_problem=self.problems.append, error_delay_seconds=0.0, **options)

    async def next(self, count: int = 1) -> list[PodInfoState]:
        return [await result(self.client.next()) for _ in range(count)]

    async def once(self, seconds: float) -> PodInfoState:
        found: PodInfoState = await result(self.client.once(seconds))
        return found


Make = Callable[..., Made]


@pytest.fixture(params=[PodInfoClient, AsyncPodInfoClient])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda *steps, **options: Made(request.param, monkeypatch, *steps, **options)


async def test_one_call_has_many_states(make: Make) -> None:
    made = make([response(FIRST), response(SECOND)])
    assert await made.next(2) == [FIRST, SECOND]
    (call,) = made.server.calls
    assert (call.timeout, call.is_cancelled) == (base.CALL_SECONDS, False)
    assert (made.server.positions, made.server.targets) == ([(0, 0)], [podinfo.DEFAULT_TARGET])


async def test_client_continues_from_the_position_that_a_program_has(make: Make) -> None:
    made = make([response(SECOND)], target="unix:/here", instance_id=7, rev=1)
    assert await made.next() == [SECOND]
    assert (made.server.positions, made.server.targets) == ([(7, 1)], ["unix:/here"])


@pytest.mark.parametrize(
    ("end", "problems"),
    [
        ([], [INCOMPLETE]),
        ([SILENT], []),
        (
            [Failure(grpc.StatusCode.UNAVAILABLE, "no\n route")],
            ["cannot read the conditions of this node's pods: no route"],
        ),
        (
            [Failure(grpc.StatusCode.UNAVAILABLE)],
            ["cannot read the conditions of this node's pods: UNAVAILABLE"],
        ),
    ],
    ids=["ended", "silent", "details", "no details"],
)
async def test_next_call_continues_from_the_last_state(
    make: Make, end: Step, problems: list[str]
) -> None:
    made = make([response(FIRST), *end], end, end, [response(SECOND), *end], [response(FIRST)])
    assert await made.next(3) == [FIRST, SECOND, FIRST]
    assert made.server.positions == [(0, 0), (7, 1), (7, 1), (7, 1), (7, 2)]
    assert [call.is_cancelled for call in made.server.calls] == 4 * [True] + [False]
    # Once for each time that calls start to fail.
    assert made.problems == 2 * problems
    assert len(made.server.targets) == 1


async def test_state_of_this_moment_is_of_a_call_of_its_own(make: Make) -> None:
    made = make([response(FIRST)], [response(SECOND)], [SILENT], [])
    assert await made.next() == [FIRST]
    assert await made.once(3.0) == SECOND
    first, second = made.server.calls
    assert (first.is_cancelled, second.timeout) == (True, 3.0)
    for text, code in (
        (
            "no state of the conditions of this node's pods within 2.5 s",
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ),
        (INCOMPLETE, grpc.StatusCode.DATA_LOSS),
    ):
        with pytest.raises(StreamError) as caught:
            await made.once(2.5)
        assert (str(caught.value), caught.value.code) == (text, code)
    assert (made.server.positions[2:], made.problems) == ([(7, 2), (7, 2)], [])


async def test_closed_client_has_ended_its_call_and_its_connection(make: Make) -> None:
    made = make([response(FIRST)])
    await made.next()
    await result(made.client.close())
    assert (made.server.calls[0].is_cancelled, made.server.is_closed) == (True, True)


async def test_cancelled_client_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(PodInfoClient, monkeypatch, [response(FIRST)])
    client = made.client
    assert isinstance(client, PodInfoClient)
    client.cancel()
    assert (client.next(), list(client), list(client.watch())) == (None, [], [])
    assert (made.server.calls, made.problems) == ([], [])


async def test_client_that_is_cancelled_while_it_fails_reports_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(PodInfoClient, monkeypatch, [Failure(grpc.StatusCode.CANCELLED)])
    client = made.client
    assert isinstance(client, PodInfoClient)
    calls: list[Cancelled] = []

    def start(*_: object, **__: object) -> Call:
        client.cancel()
        calls.append(Cancelled(pb.WatchPodConditionsRequest(), 0.0, []))
        return calls[0]

    monkeypatch.setattr(made.server, "_start", start)
    assert client.next() is None
    assert (len(calls), made.problems) == (1, [])


class Cancelled(Call):
    """Ends only if it was cancelled before it is read."""

    def __iter__(self) -> Iterator[pb.WatchPodConditionsResponse]:
        assert self.is_cancelled
        raise Failure(grpc.StatusCode.CANCELLED)


def test_client_waits_after_each_error(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(event: threading.Event, timeout: float) -> None:
        waits.append(timeout)

    failed: Step = [Failure(grpc.StatusCode.UNAVAILABLE)]
    server = SyncServer(failed, failed, [response(FIRST)])
    monkeypatch.setattr(grpc, "insecure_channel", server.open)
    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(random, "random", lambda: 0.75)
    assert PodInfoClient(error_delay_seconds=4.0).next() == FIRST
    assert waits == [5.0, 5.0]


@pytest.mark.parametrize("position", [(0, 0), (1, 0), (0, 1), ((1 << 64) - 1, (1 << 64) - 1)])
def test_any_number_of_64_bits_is_a_position(position: tuple[int, int]) -> None:
    base.check_position(*position)


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)])
def test_other_numbers_are_no_position(position: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"instance id {position[0]} and rev {position[1]}"):
        base.check_position(*position)


def test_clients_wait_for_different_times_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for chance, seconds in ((0.0, 2.0), (0.5, 4.0), (0.75, 5.0)):
        monkeypatch.setattr(random, "random", lambda chance=chance: chance)
        assert base.delay_seconds(4.0) == seconds


class Printed:
    """A client of the options that a program got, with two states."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.events: list[str] = []

    def __iter__(self) -> Iterator[PodInfoState]:
        for state in (FIRST, SECOND):
            self.events.append(f"state {state.rev}")
            yield state

    def cancel(self) -> None:
        self.events.append("cancelled")

    def close(self) -> None:
        self.events.append("closed")


def run(*arguments: str) -> tuple[Printed, list[PodInfoState]]:
    made: list[Printed] = []

    def make(**options: Any) -> Any:
        made.append(Printed(**options))
        return made[0]

    handled: list[PodInfoState] = []
    base.run(make, handled.append, base.parser_of(API), arguments)
    return made[0], handled


def test_program_handles_each_state(capsys: pytest.CaptureFixture[str]) -> None:
    client, handled = run()
    assert handled == [FIRST, SECOND]
    assert client.events == ["state 1", "state 2", "closed"]
    on_problem = client.options.pop("on_problem")
    assert client.options == {
        "target": podinfo.DEFAULT_TARGET,
        "instance_id": 0,
        "rev": 0,
        "error_delay_seconds": base.ERROR_DELAY_SECONDS,
    }
    on_problem("It is away.")
    assert capsys.readouterr() == ("", "It is away.\n")


def test_program_for_one_state_shows_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target=unix:/here", "--instance-id=7", "--rev=3", "--error-delay=3600"]
    client, handled = run("--once", *options)
    assert (handled, client.events) == ([FIRST], ["state 1", "closed"])
    del client.options["on_problem"]
    assert client.options == {
        "target": "unix:/here",
        "instance_id": 7,
        "rev": 3,
        "error_delay_seconds": 3600.0,
    }
    assert capsys.readouterr() == ("", "to continue: --instance-id 7 --rev 1\n")


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("0.25", 0.25), ("3600", 3600.0)])
def test_error_delay_may_be_from_nothing_to_an_hour(text: str, seconds: float) -> None:
    parsed: argparse.Namespace = base.parser_of(API).parse_args([f"--error-delay={text}"])
    assert parsed.error_delay_seconds == seconds


@pytest.mark.parametrize("text", ["-0.25", "3600.5", "nan", "inf", "a while"])
def test_other_error_delay_is_one_clear_sentence(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        base.parser_of(API).parse_args([f"--error-delay={text}"])
    assert f"{text} is not a number of seconds from 0 to 3600" in capsys.readouterr().err


def test_program_with_an_impossible_position_exits_with_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        base.run(PodInfoClient, print, base.parser_of(API), ["--instance-id=7", "--rev=-1"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("error: no state has instance id 7 and rev -1\n")


@pytest.mark.parametrize("is_ready", [False, True])
def test_client_is_connected_once_its_server_responds(
    monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    made = Made(PodInfoClient, monkeypatch, [response(FIRST)])
    client = made.client
    assert isinstance(client, PodInfoClient)

    class Ready:
        def result(self, timeout: float) -> None:
            if not is_ready:
                raise grpc.FutureTimeoutError

    monkeypatch.setattr(grpc, "channel_ready_future", lambda channel: Ready())
    assert client.is_connected() is is_ready


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_cancels_in_another_thread(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    threads: list[threading.Thread] = []
    with base.cancelled_by_signals(lambda: threads.append(threading.current_thread())):
        os.kill(os.getpid(), number)
        await polling.until("the call", lambda: threads)
    assert threads[0] is not threading.main_thread()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
