"""The process of a relay, and the channel to it.

The process is started by posix_spawn, since asyncio's subprocess kills its child when the loop
ends: a relay proxies its open connections after its agent has exited.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, TypeVar

import structlog

from agent.logs import Event
from agent.relay import messages
from agent.relay.control import ControlSocket

if TYPE_CHECKING:
    from agent.strict.stats import ConnectionStats

A = TypeVar("A", bound=messages.FromRelay)

log = structlog.get_logger(__name__)

# The descriptor of the relay's end of the socket pair: after stdin, stdout and stderr.
_CONTROL_FD = 3
_READ_BYTES = 1 << 16
_KILLED_SECONDS = 5
# A relay responds at once, except when it compiles bytecode or the machine is busy.
_RESPONSE_SECONDS = 10


class RelayError(Exception):
    """The relay failed, exited, or does not respond. The text has no full stop."""


class RelayChannel:
    """The agent's end. One request at a time; reports arrive in between."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        stats: "ConnectionStats",
        wake: asyncio.Event,
    ) -> None:
        """Use `open`."""
        self._reader = reader
        self._writer = writer
        self._stats = stats
        self._wake = wake
        self._response: asyncio.Future[messages.FromRelay] | None = None
        self.problem: str | None = None
        """Why the channel is closed; None while it is open."""
        self.reports = 0
        """Number of received reports."""
        self.last_report: messages.RelayReport | None = None
        self._task = asyncio.get_running_loop().create_task(self._read(), name="relay")

    @classmethod
    async def open(
        cls, sock: socket.socket, *, stats: "ConnectionStats", wake: asyncio.Event
    ) -> "RelayChannel":
        """sock: owned by the channel; stats: gets the relay's reports; wake: set when the channel
        closes, with its reason in `problem`."""
        patient = ControlSocket(fileno=sock.detach())
        reader, writer = await asyncio.open_connection(sock=patient)
        return cls(reader, writer, stats=stats, wake=wake)

    async def request(self, message: messages.ToRelay, response: type[A]) -> A:
        """Send a message and wait for the response. Raises `RelayError`."""
        if self.problem is not None:
            raise RelayError(self.problem)
        self._response = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_RESPONSE_SECONDS):
                self._writer.write(messages.pack(message))
                await self._writer.drain()
                received = await self._response
        except TimeoutError as error:
            raise RelayError(f"it did not respond within {_RESPONSE_SECONDS} s") from error
        except OSError as error:
            raise RelayError("it closed the channel") from error
        finally:
            self._response = None
        if not isinstance(received, response):
            raise RelayError(f"it sent {type(received).__name__}, not {response.__name__}")
        return received

    def send(self, message: messages.ToRelay) -> None:
        """Send a message without a response. It is lost if the channel is closed."""
        if self.problem is None:
            self._writer.write(messages.pack(message))

    def close(self) -> None:
        """Close the channel: the relay releases itself, unless it did so before."""
        self._task.cancel()
        self._writer.close()

    async def _read(self) -> None:
        try:
            frames = messages.Frames()
            while received := await self._reader.read(_READ_BYTES):
                for body in frames.feed(received):
                    self._handle(messages.decode_for_agent(body))
            self._close("it exited")
        except OSError:
            self._close("it exited")
        except messages.FrameError as error:
            self._close(f"it sent an invalid message: {error}")

    def _handle(self, message: messages.FromRelay) -> None:
        if isinstance(message, messages.RelayReport):
            self.reports += 1
            self.last_report = message
            self._stats.add(message.samples)
            self._stats.answers.add(message.answers)
        elif isinstance(message, messages.RelayWarning):
            log.warning(Event.RELAY_WARNING, problem=message.message)
        elif isinstance(message, messages.RelayFailed):
            self._close(message.message)
        elif self._response is not None and not self._response.done():
            self._response.set_result(message)

    def _close(self, problem: str) -> None:
        if self.problem is not None:
            return  # the first problem is the reason
        self.problem = problem
        if self._response is not None and not self._response.done():
            self._response.set_exception(RelayError(problem))
        self._wake.set()


class RelayProcess:
    """A relay's process, a child or another agent's, identified by a descriptor, which never means
    another process."""

    def __init__(self, pid: int) -> None:
        """Raises `ProcessLookupError`."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._reap)

    @property
    def is_running(self) -> bool:
        return not self._exited.is_set()

    def request_release(self) -> None:
        """Have a relay of another agent release itself, and drain its connections."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGTERM)

    async def kill(self) -> None:
        """Kill it, and wait until it has exited, for 5 s at most."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        try:
            async with asyncio.timeout(_KILLED_SECONDS):
                await self._exited.wait()
        except TimeoutError:
            log.error(Event.RELAY_NOT_REAPED, pid=self.pid)

    def release(self) -> None:
        """Let it continue without this agent."""
        if self.is_running:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._exited.set()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self.release()


def spawn() -> tuple[RelayProcess, socket.socket]:
    """Start a relay; return it with the agent's end of the socket pair. Raises `OSError`."""
    own_end, relay_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with relay_end:
            # The agent's other descriptors are closed on exec.
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "agent.relay", str(_CONTROL_FD)],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, relay_end.fileno(), _CONTROL_FD),
                ],
            )
        own_end.setblocking(False)
        return RelayProcess(pid), own_end
    except BaseException:
        own_end.close()
        raise
