"""Base of the clients: connect, retry, resume, cancel. Needs grpcio and protobuf only."""

import argparse
import contextlib
import dataclasses
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import grpc

# A stream is silent while nothing changes; a hung server must not be waited for without end.
CALL_SECONDS = 600.0

# After its deadline, for gRPC to end a call. After a write failed for want of memory, it may never
# end this call nor any later one of the channel.
STUCK_SECONDS = 2.0

# A connection that exists is ready at once.
_READY_SECONDS = 0.5

ERROR_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 3600.0

OPTIONS = (
    # One message has all that belongs together, at any size.
    ("grpc.max_receive_message_length", 64 << 20),
    # grpcio would wait up to two minutes before it reconnects to a restarted agent.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # No proxy is between a node and itself, whatever the environment specifies.
    ("grpc.enable_http_proxy", 0),
)


class StreamError(Exception):
    """A call failed, or its response is incomplete; the message is one sentence."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class State:
    """The whole state at one revision. instance_id: of one run of the server."""

    instance_id: int
    rev: int


StateT = TypeVar("StateT", bound=State)
StateT_co = TypeVar("StateT_co", bound=State, covariant=True)


class Session(Protocol[StateT_co]):
    """One client's requests, and what it has read; without I/O."""

    def request(self, instance_id: int, rev: int) -> Any:
        """The request of a new call, with the position of the last state. What the call before it
        read of an incomplete state is discarded."""

    def read(self, response: Any) -> StateT_co | None:
        """The state that is complete with this response, if any. Raises `StreamError`."""


@dataclasses.dataclass(frozen=True)
class Api(Generic[StateT]):
    """The method of an API that streams its states, without I/O."""

    subject: str
    """What the server publishes, for messages."""
    default_target: str
    method: str
    """Its path."""
    response: Any
    """Class of the response messages."""
    session: Callable[[], Session[StateT]]
    """Makes the session of a client without further options."""
    is_followed: bool
    """Whether one call has many states, or ends after one."""

    def start(self, channel: Any, request: Any, timeout_seconds: float) -> Any:
        """The call, on a channel of grpc or grpc.aio."""
        method = channel.unary_stream(
            self.method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=self.response.FromString,
        )
        return method(request, timeout=timeout_seconds)

    def error(self, error: grpc.RpcError) -> StreamError:
        details = " ".join((error.details() or error.code().name).split())
        return StreamError(f"cannot read {self.subject}: {details}", error.code())

    def no_state(self, timeout_seconds: float) -> StreamError:
        return StreamError(
            f"no state of {self.subject} within {timeout_seconds:g} s",
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )

    def ended(self) -> StreamError:
        return StreamError(
            f"cannot read {self.subject}: the response is incomplete", grpc.StatusCode.DATA_LOSS
        )


def check_position(instance_id: int, rev: int) -> None:
    """Raises `ValueError` for numbers that no state has."""
    if not 0 <= min(instance_id, rev) <= max(instance_id, rev) < 1 << 64:
        raise ValueError(f"no state has instance id {instance_id} and rev {rev}")


def delay_seconds(error_delay_seconds: float) -> float:
    """How long to wait after an error: half to one and a half times as long, since all clients of a
    node lose the server at the same moment, and must not return together."""
    return error_delay_seconds * (0.5 + random.random())  # noqa: S311


class ClientOptions(TypedDict, total=False):
    """Options of all clients; `StreamClient` describes them."""

    instance_id: int
    rev: int
    error_delay_seconds: float
    on_problem: Callable[[str], None]


class StreamClient(Generic[StateT]):
    """Receives each new state, whole. `cancel` may be called from any thread, the rest from one."""

    API: Api[StateT]

    def __init__(
        self,
        target: str = "",
        *,
        instance_id: int = 0,
        rev: int = 0,
        error_delay_seconds: float = ERROR_DELAY_SECONDS,
        on_problem: Callable[[str], None] = lambda problem: None,
        session: Session[StateT] | None = None,
    ) -> None:
        """target: as gRPC writes it, `unix:///path` or `127.0.0.1:9651`; the default one if empty.

        instance_id, rev: of the last state that the program has, to continue from there. Raises
        `ValueError` for numbers that no state has.
        error_delay_seconds: between attempts, half to one and a half times as long.
        on_problem: gets one sentence when calls start to fail; the client retries by itself.
        session: with the options of one API; the default one if None.
        """
        check_position(instance_id, rev)
        self.instance_id = instance_id
        self.rev = rev
        self._error_delay_seconds = error_delay_seconds
        self._on_problem = on_problem
        self._problem = ""
        self._cancelled = threading.Event()
        self._call: Any = None
        self._session = session or self.API.session()
        self._channel = grpc.insecure_channel(target or self.API.default_target, options=OPTIONS)

    def __iter__(self) -> Iterator[StateT]:
        return self.watch()

    def watch(self) -> Iterator[StateT]:
        """Each new state, until cancelled. Never raises."""
        while (state := self.next()) is not None:
            yield state

    def next(self) -> StateT | None:
        """Wait for a state other than the last; None once cancelled. Never raises."""
        while not self._cancelled.is_set():
            try:
                state = self._receive(CALL_SECONDS)
            except StreamError as error:
                self._wait_after(error)
                continue
            self._problem = ""
            if state is not None:
                return state
        return None

    def once(self, timeout_seconds: float = 30.0) -> StateT:
        """Wait for a state other than the last, without retries. Raises `StreamError`; its code is
        DEADLINE_EXCEEDED if there is no such state in time."""
        self._end()
        state = self._receive(timeout_seconds)
        if state is None:
            raise self.API.no_state(timeout_seconds)
        return state

    def cancel(self) -> None:
        """End `next`, now and from now on."""
        self._cancelled.set()
        if (call := self._call) is not None:
            call.cancel()

    def is_connected(self) -> bool:
        """Whether the server has responded on this connection; one that hangs has not."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_READY_SECONDS)
        except grpc.FutureTimeoutError:
            return False
        return True

    def close(self) -> None:
        self.cancel()
        self._channel.close()

    def _receive(self, timeout_seconds: float) -> StateT | None:
        """Wait for a state other than the last; None if there was none. Raises `StreamError`."""
        if (call := self._call) is None:
            request = self._session.request(self.instance_id, self.rev)
            self._call = call = self.API.start(self._channel, request, timeout_seconds)
            if self._cancelled.is_set():
                call.cancel()
        is_kept = False
        try:
            for response in call:
                state = self._session.read(response)
                if state is not None:
                    self.instance_id, self.rev = state.instance_id, state.rev
                    is_kept = self.API.is_followed
                    return state
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            raise self.API.error(error) from None
        finally:
            if not is_kept:
                self._end()
        raise self.API.ended()

    def _end(self) -> None:
        # grpcio may deadlock when the interpreter exits while a call object exists.
        if (call := self._call) is not None:
            call.cancel()
            self._call = None

    def _wait_after(self, error: StreamError) -> None:
        if self._cancelled.is_set():
            return
        if not self._problem:
            self._problem = str(error)
            self._on_problem(self._problem)
        self._cancelled.wait(delay_seconds(self._error_delay_seconds))


def parser_of(api: Api[Any]) -> argparse.ArgumentParser:
    """Options of all clients, as arguments of `StreamClient`, and --once."""
    parser = argparse.ArgumentParser(description=f"Follows {api.subject}.")
    parser.add_argument("--target", default=api.default_target, help="address of the server")
    parser.add_argument("--once", action="store_true", help="exit after one state")
    parser.add_argument("--instance-id", type=int, default=0, help="of the last state")
    parser.add_argument("--rev", type=int, default=0, help="of the last state")
    parser.add_argument(
        "--error-delay",
        dest="error_delay_seconds",
        metavar="SECONDS",
        type=_seconds,
        default=ERROR_DELAY_SECONDS,
        help="between attempts, half to one and a half times as long",
    )
    return parser


def run(
    make: Callable[..., StreamClient[StateT]],
    handler: Callable[[StateT], object],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM.

    make: makes the client of the parsed options but --once, by name, and of `on_problem`; parser:
    `parser_of` and further options; arguments: the process' own if None.
    """
    options = vars(parser.parse_args(arguments))
    is_once = options.pop("once")
    try:
        client = make(**options, on_problem=_print)
    except ValueError as error:
        parser.error(str(error))
    with contextlib.closing(client), cancelled_by_signals(client.cancel):
        for state in client:
            handler(state)
            if is_once:
                _print(f"to continue: --instance-id {state.instance_id} --rev {state.rev}")
                return


@contextlib.contextmanager
def cancelled_by_signals(cancel: Callable[[], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM cancel a client. For the main thread."""

    def start_cancelling(*_: object) -> None:
        # Not in the handler itself: it may have interrupted code that holds a lock of the client.
        threading.Thread(target=cancel).start()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, start_cancelling) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        # Not NaN and not infinite: a wait of these raises an error, or never ends.
        if 0 <= (seconds := float(text)) <= MAX_DELAY_SECONDS:
            return seconds
    raise argparse.ArgumentTypeError(
        f"{text} is not a number of seconds from 0 to {MAX_DELAY_SECONDS:g}"
    )


def _print(sentence: str) -> None:
    print(sentence, file=sys.stderr)  # noqa: T201
