"""The other end of trial servers: starts one in a copy of the tree, and judges what it answers."""

import multiprocessing
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace

from tests.mutants.protocol import STRETCH, Answer, Request

# To import all unit tests on a machine with other load.
_START_SECONDS = 600
# For the fork, and to remove what it leaves.
_ANSWER_SECONDS = 60

Start = Callable[[int], "subprocess.Popen[bytes]"]
"""Starts a server with this descriptor of its connection."""


class ServerError(Exception):
    """A mutant cannot be tried by a fork: the message is the reason."""


class StartError(Exception):
    """The server does not start: the message is the reason."""


class Server:
    """A trial server, which ends with the thread that started it."""

    def __init__(self, start: Start) -> None:
        """Raises `StartError`."""
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = start(theirs.fileno())
        try:
            problem = self._receive(_START_SECONDS).problem
        except ServerError as error:
            problem = str(error)
        if problem:
            self.close()
            raise StartError(problem)

    def send(self, request: Request) -> Answer:
        """Raises `ServerError` if the server has ended, and ends it if it does not answer."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise ServerError("the server has ended") from error
        return self._receive(_ANSWER_SECONDS + STRETCH * request.all_seconds)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, seconds: float) -> Answer:
        try:
            if self._connection.poll(seconds):
                answer: Answer = self._connection.recv()
                return answer
        except (EOFError, OSError) as error:
            raise ServerError("the server has ended") from error
        raise ServerError(f"the server does not answer within {seconds:.0f} s")


class Forks:
    """Tries the mutants of one copy by forks of a server, which starts with the first.

    The first failure of each test is checked: it counts if the test passes in a fork without a
    mutant.
    """

    def __init__(
        self, start: Start, write: Callable[[str, str], None], without: Iterable[str]
    ) -> None:
        """write: a module's source into the copy; without: tests that are left out."""
        self._start = start
        self._write = write
        self._without = frozenset(without)
        self._server: Server | None = None
        self._failing: set[str] = set()
        self._passing: set[tuple[str, ...]] = set()

    def try_(self, request: Request) -> tuple[bool, list[str]]:
        """Whether tests detect a mutant, and those that cannot since they fail without it, too:
        functions. Raises `ServerError` and `StartError`."""
        while True:
            failed = self._failed(request)
            if not failed or self._pass(failed, request):
                return bool(failed), self._unable(request)
            if len(failed) > 1:
                raise ServerError("pytest fails after its tests in a fork without a mutant, too")
            self._failing.update(failed)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _failed(self, request: Request) -> tuple[str, ...]:
        # Before the change, which it would import.
        self._server = self._server or Server(self._start)
        self._write(request.path, request.changed)
        try:
            answer = self._server.send(replace(request, without=self._without | self._failing))
        except ServerError:
            self.close()
            raise
        finally:
            self._write(request.path, request.source)
        if answer.problem:
            raise ServerError(answer.problem)
        return answer.failed

    def _pass(self, tests: tuple[str, ...], request: Request) -> bool:
        """Whether tests pass with the source as it is."""
        if tests not in self._passing:
            if self._failed(replace(request, changed=request.source, tests=tests)):
                return False
            self._passing.add(tests)
        return True

    def _unable(self, request: Request) -> list[str]:
        functions = {test.partition("[")[0] for test in self._failing}
        tests = set(request.tests)
        return sorted(test for test in functions if tests & {test, test.partition("::")[0]})
