"""One relay's process, and the conversation with it.

It is started by posix_spawn and not by asyncio's subprocess, which kills its child when the loop
ends: a relay carries what it began after its agent has gone.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

import structlog

from agent.relay import messages

A = TypeVar("A", bound=messages.FromRelay)

log = structlog.get_logger(__name__)

# The number by which the relay finds its end of the socket pair: after stdin, stdout and stderr.
_CONTROL_FD = 3
_READ_BYTES = 1 << 16
_KILLED_SECONDS = 5
# A relay answers at once; compiled bytecode or a busy machine may make it wait.
_ANSWER_SECONDS = 10


class RelayError(Exception):
    """The relay failed, ended, or does not answer; the message is one sentence without a full
    stop."""


class Conversation:
    """The agent's end. One question at a time; reports come in between."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        on_report: Callable[[messages.RelayReport], None],
        on_end: Callable[[], None],
    ) -> None:
        """Use `open`."""
        self._reader = reader
        self._writer = writer
        self._on_report = on_report
        self._on_end = on_end
        self._answer: asyncio.Future[messages.FromRelay] | None = None
        self.problem: str | None = None
        """Why nothing more is heard; None while the relay is there."""
        self.reports = 0
        """How many have come."""
        self._task = asyncio.get_running_loop().create_task(self._read(), name="relay")

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        *,
        on_report: Callable[[messages.RelayReport], None],
        on_end: Callable[[], None],
    ) -> "Conversation":
        """sock: ours from now on. on_end: called once, when `problem` says why."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, on_report=on_report, on_end=on_end)

    async def ask(self, message: messages.ToRelay, answer: type[A]) -> A:
        """Say something and wait for the answer. Raises `RelayError`."""
        if self.problem is not None:
            raise RelayError(self.problem)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                self._writer.write(messages.pack(message))
                await self._writer.drain()
                answered = await self._answer
        except TimeoutError as error:
            raise RelayError(f"it did not answer within {_ANSWER_SECONDS} s") from error
        except OSError as error:
            raise RelayError("it does not listen any more") from error
        finally:
            self._answer = None
        if not isinstance(answered, answer):
            raise RelayError(f"it answered {type(answered).__name__}, not {answer.__name__}")
        return answered

    def tell(self, message: messages.ToRelay) -> None:
        """Say something that is not answered, without waiting; lost on one who does not listen."""
        if self.problem is None:
            self._writer.write(messages.pack(message))

    def close(self) -> None:
        """Hear and say no more: the relay releases, if it was not told so before."""
        self._task.cancel()
        self._writer.close()

    async def _read(self) -> None:
        try:
            frames = messages.Frames()
            while received := await self._reader.read(_READ_BYTES):
                for body in frames.feed(received):
                    self._take(messages.decode_for_agent(body))
            self._end("it ended")
        except OSError:
            self._end("it ended")
        except messages.FrameError as error:
            self._end(f"it says what nobody understands: {error}")

    def _take(self, message: messages.FromRelay) -> None:
        if isinstance(message, messages.RelayReport):
            self.reports += 1
            self._on_report(message)
        elif isinstance(message, messages.RelayWarning):
            log.warning("trouble at the relay", detail=message.message)
        elif isinstance(message, messages.RelayFailed):
            self._end(message.message)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _end(self, problem: str) -> None:
        if self.problem is not None:
            return  # what came first is the reason
        self.problem = problem
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RelayError(problem))
        self._on_end()


class Process:
    """A child of ours, known by a descriptor so that no other is ever meant."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._reap)

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    async def kill(self) -> None:
        """End it at once, and wait until it has ended, for 5 s at most."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        try:
            async with asyncio.timeout(_KILLED_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            log.error("a relay that was killed hangs in the kernel", pid=self.pid)

    def leave(self) -> None:
        """Let it live on without us."""
        if self.is_running:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._ended.set()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self.leave()


def spawn() -> tuple[Process, socket.socket]:
    """Start a relay; our end of the socket pair. Raises `OSError`."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with its:
            # Descriptors of ours are closed on exec, but for the one that is put in place.
            pid = os.posix_spawn(
                sys.executable,
                [
                    *(sys.executable, "-m", "agent.relay"),
                    str(_CONTROL_FD),
                ],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, its.fileno(), _CONTROL_FD),
                ],
            )
        ours.setblocking(False)
        return Process(pid), ours
    except BaseException:
        ours.close()
        raise
