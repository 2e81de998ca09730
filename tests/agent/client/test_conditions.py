"""What a condition publisher sends to each stream, and what it makes of each response."""

import asyncio
import contextlib
import dataclasses
import gc
import pathlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from agent.client import base, conditions
from agent.client.conditions import (
    AsyncConditionPublisher,
    ConditionPublisher,
    Handlers,
    Rejection,
)
from agent.client.v1alpha1 import conditions_pb2 as pb
from tests import polling

OWNER = "gpu.example.com"
HEALTHY = f"{OWNER}/healthy"
OPEN = pb.PublishRequest(number=1, open=pb.Open(owner=OWNER))
Publisher = ConditionPublisher | AsyncConditionPublisher


class Server:
    """Receives requests, and sends the responses that a test has."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.streams: list[list[pb.PublishRequest]] = []
        self.responses: Callable[[pb.PublishRequest], list[pb.PublishResponse]] = lambda _: []
        self.ends_after = 0
        """Requests after which the server ends its stream; 0: none."""
        self.stays = False
        """Whether a stream stays open when its client sends no more."""
        self.cancelled: list[bool] = []
        """For each stream that stayed open, whether its client ended it."""
        self._code = grpc.StatusCode.OK

    @property
    def received(self) -> list[pb.PublishRequest]:
        """By the newest stream."""
        return self.streams[-1] if self.streams else []

    def _publish(
        self, requests: Iterator[pb.PublishRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.PublishResponse]:
        received: list[pb.PublishRequest] = []
        self.streams.append(received)
        with contextlib.suppress(grpc.RpcError):
            for request in requests:
                received.append(request)
                yield from self.responses(request)
                if len(received) == self.ends_after:
                    return
        if self.stays:
            ended = threading.Event()
            self.cancelled.append(not context.add_callback(ended.set) or ended.wait(5))

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        with futures.ThreadPoolExecutor(4) as pool:
            server = grpc.server(pool)
            handler = grpc.stream_stream_rpc_method_handler(
                self._publish,
                request_deserializer=pb.PublishRequest.FromString,
                response_serializer=pb.PublishResponse.SerializeToString,
            )
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(conditions.SERVICE, {"Publish": handler}),)
            )
            server.add_insecure_port(f"unix:{self.path}")
            server.start()
            try:
                yield
            finally:
                server.stop(None).wait()


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Server:
    return Server(tmp_path / "s")


class Program:
    """A publisher of either kind, and what it has reported, in order."""

    def __init__(self, target: pathlib.Path) -> None:
        self.handled: list[object] = []
        self.threads: set[str] = set()
        self._target = f"unix:{target}"
        self.handlers = Handlers(
            on_problem=self._note,
            on_rejected=self._note,
            on_reset=lambda uid, kind: self._note((uid, kind)),
        )

    def _note(self, what: object) -> None:
        self.threads.add(threading.current_thread().name)
        self.handled.append(what)

    @property
    def problems(self) -> list[object]:
        return [one for one in self.handled if isinstance(one, str)]

    @property
    def answers(self) -> list[object]:
        return [one for one in self.handled if not isinstance(one, str)]

    @contextlib.asynccontextmanager
    async def running(self, kind: type[Publisher]) -> AsyncIterator[Publisher]:
        options: dict[str, Any] = {"handlers": self.handlers, "error_delay_seconds": 0.01}
        if kind is ConditionPublisher:
            with ConditionPublisher(OWNER, self._target, **options) as publisher:
                yield publisher
            return
        made = AsyncConditionPublisher(OWNER, self._target, **options)
        task = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def program(server: Server) -> Program:
    return Program(server.path)


def condition(uid: str, reason: str, kind: str = HEALTHY, **more: Any) -> pb.Condition:
    return pb.Condition(pod_uid=uid, type=kind, status="True", reason=reason, **more)


async def until_received(server: Server, count: int) -> list[pb.PublishRequest]:
    await polling.until(f"{count} requests", lambda: len(server.received) >= count)
    return server.received


BOTH = pytest.mark.parametrize("kind", [ConditionPublisher, AsyncConditionPublisher])


@BOTH
async def test_each_stream_starts_with_all_that_was_set(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    async with program.running(kind) as publisher:
        publisher.set("a", "healthy", "True", "First", "It is well.")
        publisher.set("b", "disk.example.com/mounted", "True", "First")
        publisher.set("b", "healthy", "True", "First")
        publisher.set("a", "healthy", "True", "Second")
        publisher.remove("b", "healthy")
        publisher.complete()
        await polling.until("a problem", lambda: program.problems)
        with server.serving():
            found = list(await until_received(server, 4))
            assert [one.WhichOneof("action") for one in found] == [
                "open",
                "set",
                "set",
                "complete",
            ]
            assert [one.set for one in found[1:3]] == [
                condition("a", "Second"),
                condition("b", "First", "disk.example.com/mounted"),
            ]
            assert found[0].open.owner == OWNER
            publisher.remove("b", "disk.example.com/mounted")
            publisher.set("c", "healthy", "False", "Hot", "It is hot.")
            last = (await until_received(server, 6))[4:]
            first = found[0].number
            assert [one.number for one in server.received] == list(range(first, first + 6))
            assert last[0].remove == pb.Remove(pod_uid="b", type="disk.example.com/mounted")
            assert last[1].set == pb.Condition(
                pod_uid="c", type=HEALTHY, status="False", reason="Hot", message="It is hot."
            )
        await polling.until("another problem", lambda: len(program.problems) >= 2)
        with server.serving():
            await polling.until("another stream", lambda: len(server.streams) == 2)
            again = await until_received(server, 4)
            assert [one.set.pod_uid for one in again] == ["", "a", "c", ""]


@BOTH
async def test_incomplete_program_is_not_complete_to_a_later_agent(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    async with program.running(kind) as publisher:
        publisher.set("a", "healthy", "True", "First")
        with server.serving():
            await until_received(server, 2)
            publisher.set("b", "healthy", "True", "First")
            found = await until_received(server, 3)
    assert [one.WhichOneof("action") for one in found] == ["open", "set", "set"]


@BOTH
async def test_response_decides_what_the_next_stream_has(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    """By the pod's uid here."""
    codes = {"rejected": 3, "unheard": 99, "aborted": 10, "good": 0}

    def respond(request: pb.PublishRequest) -> list[pb.PublishResponse]:
        uid = request.set.pod_uid
        if uid not in codes:
            return [pb.PublishResponse(number=request.number, code=3, message="no report")]
        return [
            pb.PublishResponse(
                number=request.number, code=codes[uid], message="Why.", sandbox=f"{uid}-1"
            )
        ]

    server.responses = respond
    async with program.running(kind) as publisher:
        for uid in codes:
            publisher.set(uid, "healthy", "True", "First")
        with server.serving():
            await until_received(server, 5)
            await polling.until("three reports", lambda: len(program.answers) >= 3)
            assert program.answers == [
                Rejection("rejected", HEALTHY, grpc.StatusCode.INVALID_ARGUMENT, "Why."),
                Rejection("unheard", HEALTHY, grpc.StatusCode.UNKNOWN, "Why."),
                ("aborted", HEALTHY),
            ]
            # Its response is behind the others.
            publisher.set("last", "healthy", "True", "First")
            await until_received(server, 6)
        with server.serving():
            await polling.until("another stream", lambda: len(server.streams) == 2)
            found = await until_received(server, 2)
    assert [one.set.pod_uid for one in found][:2] == ["", "good"]
    assert found[1].set == condition("good", "First", sandbox="good-1")


@BOTH
async def test_report_whose_response_was_lost_is_repeated_as_such(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    def respond(request: pb.PublishRequest) -> list[pb.PublishResponse]:
        uid = request.set.pod_uid
        code = 3 if uid == "rejected" else 0
        response = pb.PublishResponse(number=request.number, code=code, sandbox=f"{uid}-1")
        return [] if uid == "lost" and len(server.streams) < 3 else [response]

    server.responses = respond
    expected = [
        [condition("good", "First", sandbox="good-1"), lost]
        for lost in (
            *[condition("lost", "First", is_repeated=True)] * 2,
            condition("lost", "First", sandbox="lost-1"),
        )
    ]

    async def first_reports(publisher: Publisher, number: int) -> list[pb.Condition]:
        """Of the stream with this number, which has had all of its responses then."""
        with server.serving():
            await polling.until("a stream", lambda: len(server.streams) >= number)
            found = [one.set for one in (await until_received(server, 3))[1:3]]
            # Its response is behind the others.
            publisher.set("rejected", "healthy", "True", "First")
            await polling.until(
                "the rejection",
                lambda: sum(isinstance(one, Rejection) for one in program.handled) >= number,
            )
            return found

    async with program.running(kind) as publisher:
        publisher.set("good", "healthy", "True", "First")
        publisher.set("lost", "healthy", "True", "First")
        found = [await first_reports(publisher, number) for number in range(1, 5)]
    assert found[1:] == expected


@BOTH
async def test_report_that_was_set_between_two_streams_is_not_a_repeated_one(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    def respond(request: pb.PublishRequest) -> list[pb.PublishResponse]:
        is_first = len(server.streams) == 1 and request.HasField("open")
        return [pb.PublishResponse(number=request.number)] if is_first else []

    def set_again(_: str) -> None:
        if len(server.streams) == 1:
            publishers[0].set("set-again", "healthy", "True", "Between")

    server.responses = respond
    server.ends_after = 3
    program.handlers = dataclasses.replace(program.handlers, on_problem=set_again)
    publishers: list[Publisher] = []
    async with program.running(kind) as publisher:
        publisher.set("lost", "healthy", "True", "First")
        publisher.set("set-again", "healthy", "True", "First")
        publishers.append(publisher)
        with server.serving():
            await polling.until("another stream", lambda: len(server.streams) >= 2)
            found = await until_received(server, 3)
    assert [one.set for one in found[1:3]] == [
        condition("lost", "First", is_repeated=True),
        condition("set-again", "Between"),
    ]


async def test_report_in_flight_when_run_is_cancelled_is_a_repeated_one_when_it_runs_again(
    server: Server, program: Program
) -> None:
    async def first_report(number: int) -> pb.Condition:
        """Of the stream with this number, which ends with a cancelled `run`."""
        task = asyncio.create_task(publisher.run())
        await polling.until("a stream", lambda: len(server.streams) >= number)
        found = await until_received(server, 2)
        # Its response is behind that to `open`.
        publisher.set("rejected", "healthy", "True", "First")
        await polling.until("the rejection", lambda: len(program.answers) >= number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found[1].set

    def respond(request: pb.PublishRequest) -> list[pb.PublishResponse]:
        uid = request.set.pod_uid
        code = 3 if uid == "rejected" else 0
        return [] if uid == "lost" else [pb.PublishResponse(number=request.number, code=code)]

    server.responses = respond
    publisher = AsyncConditionPublisher(OWNER, f"unix:{server.path}", handlers=program.handlers)
    publisher.set("lost", "healthy", "True", "First")
    with server.serving():
        found = [await first_report(number) for number in (1, 2)]
    assert found == [
        condition("lost", "First"),
        condition("lost", "First", is_repeated=True),
    ]


async def test_streams_that_have_ended_leave_no_tasks(server: Server, program: Program) -> None:
    server.ends_after = 1
    async with program.running(AsyncConditionPublisher):
        with server.serving():
            # Garbage collection would find such a task in the end, and log it.
            gc.disable()
            try:
                await polling.until("twenty streams", lambda: len(server.streams) >= 20)
                assert len(asyncio.all_tasks()) < 10
            finally:
                gc.enable()


@BOTH
async def test_only_the_response_to_the_last_report_counts(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    """A program sets a condition again before it has the response."""
    waiting: list[pb.PublishResponse] = []

    def respond(request: pb.PublishRequest) -> list[pb.PublishResponse]:
        if request.set.reason == "Last":
            return [
                pb.PublishResponse(reset=pb.Remove(pod_uid="b", type=HEALTHY)),
                *waiting,
                pb.PublishResponse(number=request.number, code=10),
                pb.PublishResponse(number=request.number, code=3),
            ]
        waiting.append(pb.PublishResponse(number=request.number, code=3))
        return []

    server.responses = respond
    async with program.running(kind) as publisher:
        with server.serving():
            await until_received(server, 1)
            publisher.set("a", "healthy", "True", "First")
            publisher.set("b", "healthy", "True", "First")
            publisher.set("a", "healthy", "True", "Second")
            publisher.set("a", "healthy", "True", "Last")
            await polling.until("two reports", lambda: len(program.answers) >= 2)
            await asyncio.sleep(0)
    handled = program.answers
    assert handled == [
        Rejection("b", HEALTHY, grpc.StatusCode.INVALID_ARGUMENT, ""),
        ("a", HEALTHY),
    ]


@BOTH
async def test_condition_of_a_pod_with_another_sandbox_is_not_sent_again(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    def respond(request: pb.PublishRequest) -> list[pb.PublishResponse]:
        found = [pb.PublishResponse(number=request.number)]
        if request.set.pod_uid == "b":
            found.append(pb.PublishResponse(reset=pb.Remove(pod_uid="a", type=HEALTHY)))
        return found

    server.responses = respond
    async with program.running(kind) as publisher:
        publisher.set("a", "healthy", "True", "First")
        with server.serving():
            await until_received(server, 2)
            publisher.set("b", "healthy", "True", "First")
            await polling.until("the reset", lambda: ("a", HEALTHY) in program.handled)
        with server.serving():
            await polling.until("another stream", lambda: len(server.streams) == 2)
            found = await until_received(server, 2)
    assert [one.set.pod_uid for one in found] == ["", "b"]


@BOTH
async def test_problem_is_reported_once_until_it_is_over(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    server.responses = lambda request: [pb.PublishResponse(number=request.number)]
    server.ends_after = 1
    async with program.running(kind):
        with server.serving():
            await polling.until("some streams", lambda: len(server.streams) >= 3)
            # Each has had a response before it ended.
            assert program.problems.count("cannot publish conditions: the stream has ended") >= 2
            server.responses = lambda request: []
            await polling.until("a silent stream", lambda: len(server.streams) >= 6)
            count = len(program.problems)
            await polling.until("further streams", lambda: len(server.streams) >= 9)
            assert len(program.problems) == count


async def test_handlers_of_a_publisher_run_on_its_thread(server: Server, program: Program) -> None:
    async with program.running(ConditionPublisher):
        await polling.until("a problem", lambda: program.problems)
    assert program.threads == {"podgate conditions"}


async def test_closed_publisher_sends_nothing_more(server: Server, program: Program) -> None:
    with server.serving():
        async with program.running(ConditionPublisher) as publisher:
            await until_received(server, 1)
        publisher.set("a", "healthy", "True", "Late")
        await asyncio.sleep(0)
    assert (len(server.streams), len(server.received), program.handled) == (1, 1, [])


@BOTH
async def test_report_without_a_response_is_rejected_by_the_next_stream(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    server.ends_after = 2

    def respond(request: pb.PublishRequest) -> list[pb.PublishResponse]:
        is_report = len(server.streams) > 1 and request.HasField("set")
        return [pb.PublishResponse(number=request.number, code=3)] if is_report else []

    server.responses = respond
    async with program.running(kind) as publisher:
        publisher.set("a", "healthy", "True", "First")
        with server.serving():
            await polling.until(
                "the rejection", lambda: any(isinstance(one, Rejection) for one in program.handled)
            )
    rejected = [one for one in program.handled if isinstance(one, Rejection)]
    assert rejected == [Rejection("a", HEALTHY, grpc.StatusCode.INVALID_ARGUMENT, "")]


@BOTH
async def test_publisher_waits_after_each_stream(
    server: Server, program: Program, kind: type[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []

    def delay_seconds(error_delay_seconds: float) -> float:
        delays.append(error_delay_seconds)
        return error_delay_seconds

    monkeypatch.setattr(base, "delay_seconds", delay_seconds)
    server.ends_after = 1
    with server.serving():
        async with program.running(kind):
            await polling.until("some streams", lambda: len(server.streams) >= 4)
    assert len(delays) >= 3
    assert set(delays) == {0.01}


@BOTH
async def test_ended_publisher_ends_its_stream(
    server: Server, program: Program, kind: type[Publisher]
) -> None:
    server.stays = True
    with server.serving():
        async with program.running(kind):
            await until_received(server, 1)
        await polling.until("the end", lambda: server.cancelled)
    assert server.cancelled == [True]


async def test_streams_that_have_ended_leave_no_threads(server: Server, program: Program) -> None:
    server.ends_after = 1
    before = threading.active_count()
    with server.serving():
        async with program.running(ConditionPublisher):
            await polling.until("some streams", lambda: len(server.streams) >= 25)
            assert threading.active_count() < before + 20


async def test_closed_publisher_has_closed_its_channel(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[grpc.Channel] = []
    open_channel = grpc.insecure_channel

    def opened(*arguments: Any, **options: Any) -> grpc.Channel:
        channel = open_channel(*arguments, **options)
        original = channel.close

        def close() -> None:
            closed.append(channel)
            original()

        monkeypatch.setattr(channel, "close", close)
        return channel

    monkeypatch.setattr(grpc, "insecure_channel", opened)
    async with program.running(ConditionPublisher):
        assert closed == []
    assert len(closed) == 1
