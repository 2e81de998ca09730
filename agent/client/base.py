"""What the clients of the local APIs share; needs nothing but grpcio."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import grpc

_OPTIONS: Final = (
    # What belongs together is in one message, however much it is.
    ("grpc.max_receive_message_length", 64 << 20),
    # grpcio would wait up to two minutes before it looks whether a restarted agent is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # No proxy stands between a node and itself, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
)


class Client(Protocol):
    """Gets each new state, which has `instance_id` and `rev`; `cancel` ends that."""

    def __iter__(self) -> Iterator[Any]: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


def channel(target: str) -> grpc.Channel:
    """To a server of this node. target: as gRPC writes it, `unix:///path` or `127.0.0.1:9651`."""
    return grpc.insecure_channel(target, options=_OPTIONS)


def check_known(instance_id: int, rev: int) -> None:
    """Raises `ValueError` where they are not those of any state."""
    if not 0 <= min(instance_id, rev) <= max(instance_id, rev) < 1 << 64:
        raise ValueError(f"instance id {instance_id} and rev {rev} are not those of a state")


def run(
    description: str,
    target: str,
    make: Callable[..., Client],
    handler: Callable[[Any], object],
    arguments: Sequence[str] | None,
) -> None:
    """Call `handler` with each new state until SIGINT or SIGTERM, as the command line says.

    target: unless the command line names another.
    make: gets the target, and `instance_id`, `rev` and `on_problem`; may raise `ValueError`.
    arguments: those of the process, if None.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--target", default=target, help="where the server listens")
    parser.add_argument("--once", action="store_true", help="end after one state")
    parser.add_argument("--instance-id", type=int, default=0, help="of the state that is known")
    parser.add_argument("--rev", type=int, default=0, help="of the state that is known")
    options = parser.parse_args(arguments)
    try:
        client = make(
            options.target,
            instance_id=options.instance_id,
            rev=options.rev,
            on_problem=_tell,
        )
    except ValueError as error:
        parser.error(str(error))
    with contextlib.closing(client), cancelled_by_signals(client.cancel):
        for state in client:
            handler(state)
            if options.once:
                _tell(f"to go on from here: --instance-id {state.instance_id} --rev {state.rev}")
                return


@contextlib.contextmanager
def cancelled_by_signals(cancel: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM end what a client waits for. For the main thread."""

    def start_cancelling(*_: object) -> None:
        # Not in the handler itself: it may have interrupted one who holds a lock of the client's.
        threading.Thread(target=cancel).start()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, start_cancelling) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201
