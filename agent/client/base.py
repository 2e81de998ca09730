"""Base of the clients: connect, retry, resume, cancel. Needs grpcio only."""

import abc
import argparse
import contextlib
import dataclasses
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import grpc

# A stream is silent while nothing changes; a hung server must not be waited for without end.
CALL_SECONDS = 600.0

# A connection that exists is ready at once.
_READY_SECONDS = 0.5

_OPTIONS = (
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


class StreamClient(abc.ABC, Generic[StateT]):
    """Receives each new state, whole. `cancel` may be called from any thread, the rest from one."""

    SUBJECT: ClassVar[str]
    """What the server publishes, for messages."""
    DEFAULT_TARGET: ClassVar[str]

    def __init__(
        self,
        target: str = "",
        *,
        instance_id: int = 0,
        rev: int = 0,
        error_delay_seconds: float = 0.5,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """target: as gRPC writes it, `unix:///path` or `127.0.0.1:9651`; the default one if empty.

        instance_id, rev: of the last state that the program has, to continue from there. Raises
        `ValueError` for numbers that no state has.
        error_delay_seconds: between attempts, half to one and a half times as long.
        on_problem: gets one sentence when calls start to fail; the client retries by itself.
        """
        if not 0 <= min(instance_id, rev) <= max(instance_id, rev) < 1 << 64:
            raise ValueError(f"no state has instance id {instance_id} and rev {rev}")
        self.instance_id = instance_id
        self.rev = rev
        self._error_delay_seconds = error_delay_seconds
        self._on_problem = on_problem
        self._problem = ""
        self._cancelled = threading.Event()
        self._call: Any = None
        self._channel = grpc.insecure_channel(target or self.DEFAULT_TARGET, options=_OPTIONS)
        self._add_methods()

    def __iter__(self) -> Iterator[StateT]:
        """Each new state, until cancelled."""
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

    @abc.abstractmethod
    def _add_methods(self) -> None:
        """Create the methods that `_receive` calls, on the channel."""

    @abc.abstractmethod
    def _receive(self, timeout_seconds: float) -> StateT | None:
        """Wait for a state other than the last; None if there was none. Raises `StreamError`."""

    def _start(self, call: Any) -> Any:
        """Let `cancel` end a call."""
        self._call = call
        if self._cancelled.is_set():
            call.cancel()
        return call

    def _advance(self, state: StateT) -> StateT:
        """The next call continues from this state."""
        self.instance_id, self.rev = state.instance_id, state.rev
        return state

    def _stream_error(self, error: grpc.RpcError) -> StreamError:
        details = " ".join((error.details() or error.code().name).split())
        return StreamError(f"cannot read {self.SUBJECT}: {details}", error.code())

    def _wait_after(self, error: StreamError) -> None:
        if self._cancelled.is_set():
            return
        if not self._problem:
            self._problem = str(error)
            self._on_problem(self._problem)
        # All clients of a node lose the server at the same moment, and must not return together.
        self._cancelled.wait(self._error_delay_seconds * (0.5 + random.random()))  # noqa: S311


def run(
    make: type[StreamClient[StateT]],
    handler: Callable[[StateT], object],
    arguments: Sequence[str] | None,
) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM, with the options of the command
    line. arguments: the process' own if None."""
    parser = argparse.ArgumentParser(description=f"Follows {make.SUBJECT}.")
    parser.add_argument("--target", default=make.DEFAULT_TARGET, help="address of the server")
    parser.add_argument("--once", action="store_true", help="exit after one state")
    parser.add_argument("--instance-id", type=int, default=0, help="of the last state")
    parser.add_argument("--rev", type=int, default=0, help="of the last state")
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


def _print(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201
