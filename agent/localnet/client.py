"""Follow what this node should use of each service; needs nothing but grpcio and protobuf.

A whole client:

    from agent.localnet import client

    client.run(lambda state: print(state.rev, len(state.services)))
"""

import argparse
import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc

from agent.localnet import endpoints_pb2

DEFAULT_TARGET: Final = "unix:///run/podgate/localnet/localnet.sock"
METHOD: Final = "/podgate.localnet.v1alpha1.Endpoints/Next"

# Nothing may be new for as long as it likes; a server that hangs must not be waited for for ever.
_CALL_SECONDS: Final = 600.0
_OPTIONS: Final = (
    # A service's endpoints are in one message, however many they are.
    ("grpc.max_receive_message_length", 64 << 20),
    # grpcio would wait up to two minutes before it looks whether a restarted agent is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # No proxy stands between a node and itself, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
)


class Broken(Exception):
    """The server could not be asked, or what it told is not whole; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class State:
    """All that is to be known at one revision."""

    instance_id: int
    rev: int
    services: tuple[endpoints_pb2.ServiceEndpoints, ...]
    """Sorted by namespace and name."""


class Client:
    """Gets each new state, whole. `cancel` may be called from any thread, the rest from one."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        instance_id: int = 0,
        rev: int = 0,
        error_delay_seconds: float = 0.5,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """target: as gRPC writes it, `unix:///path` or `127.0.0.1:9651`.

        instance_id, rev: of the state that is known already, to go on from there. Raises
        `ValueError` for numbers that cannot be.
        on_problem: gets one sentence when asking begins to fail; it goes on by itself.
        """
        if not 0 <= min(instance_id, rev) <= max(instance_id, rev) < 1 << 64:
            raise ValueError(f"instance id {instance_id} and rev {rev} are not those of a state")
        self.instance_id = instance_id
        self.rev = rev
        self._error_delay_seconds = error_delay_seconds
        self._on_problem = on_problem
        self._problem = ""
        self._cancelled = threading.Event()
        self._call: Any = None
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._next = self._channel.unary_stream(
            METHOD,
            request_serializer=endpoints_pb2.NextFilter.SerializeToString,
            response_deserializer=endpoints_pb2.NextItem.FromString,
        )

    def __iter__(self) -> Iterator[State]:
        """Each new state, until cancelled."""
        while (state := self.next()) is not None:
            yield state

    def next(self) -> State | None:
        """Wait for a state other than the last; None once cancelled. Never fails."""
        while not self._cancelled.is_set():
            try:
                state = self.ask(_CALL_SECONDS)
            except Broken as error:
                if not self._cancelled.is_set() and not self._problem:
                    self._problem = str(error)
                    self._on_problem(self._problem)
                self._cancelled.wait(self._error_delay_seconds)
                continue
            self._problem = ""
            if state is not None:
                return state
        return None

    def ask(self, timeout_seconds: float) -> State | None:
        """Wait once for a state other than the last; None if there was none. Raises `Broken`."""
        known = endpoints_pb2.NextFilter(instance_id=self.instance_id, rev=self.rev)
        call = self._next(known, timeout=timeout_seconds)
        self._call = call
        if self._cancelled.is_set():
            call.cancel()
        state = None
        try:
            state = _whole(call)
        except grpc.RpcError:
            if call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Broken(
                    f"the node's service endpoints cannot be asked for: {call.details()}"
                ) from None
        finally:
            call.cancel()
        if state is not None:
            self.instance_id, self.rev = state.instance_id, state.rev
        return state

    def cancel(self) -> None:
        """End `next`, for good."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        self.cancel()
        self._channel.close()


def run(handler: Callable[[State], object], arguments: Sequence[str] | None = None) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM, as the command line says.

    arguments: those of the process, if None.
    """
    parser = argparse.ArgumentParser(description="Follows the service endpoints of this node.")
    parser.add_argument("--target", default=DEFAULT_TARGET, help="where the server listens")
    parser.add_argument("--once", action="store_true", help="end after one state")
    parser.add_argument("--instance-id", type=int, default=0, help="of the state that is known")
    parser.add_argument("--rev", type=int, default=0, help="of the state that is known")
    options = parser.parse_args(arguments)
    try:
        client = Client(
            options.target,
            instance_id=options.instance_id,
            rev=options.rev,
            on_problem=lambda problem: print(problem, file=sys.stderr, flush=True),  # noqa: T201
        )
    except ValueError as error:
        parser.error(str(error))
    with contextlib.closing(client), _cancelled_by_signals(client):
        for state in client:
            handler(state)
            if options.once:
                print(  # noqa: T201
                    f"to go on from here: --instance-id {state.instance_id} --rev {state.rev}",
                    file=sys.stderr,
                )
                return


@contextlib.contextmanager
def _cancelled_by_signals(client: Client) -> Iterator[None]:
    def cancel(*_: object) -> None:
        # Not in the handler itself: it may have interrupted one who holds a lock of the client's.
        threading.Thread(target=client.cancel).start()

    before = {number: signal.signal(number, cancel) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _whole(items: Iterator[endpoints_pb2.NextItem]) -> State:
    """Raises `Broken` for anything but a header, services and the end."""
    services: list[endpoints_pb2.ServiceEndpoints] = []
    header: endpoints_pb2.NextFilter | None = None
    for item in items:
        kind = item.WhichOneof("item")
        if kind == "next" and header is None:
            header = item.next
        elif kind == "services" and header is not None:
            services += item.services.items
        elif kind == "end" and header is not None and item.end.service_count == len(services):
            return State(header.instance_id, header.rev, tuple(services))
        else:
            break
    raise Broken("what the server tells of the services is not whole")
