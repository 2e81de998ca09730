"""One interactive shell to which a test types the commands of a page."""

import contextlib
import os
import pathlib
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping

from tests import polling
from tests.docs import blocks
from tests.docs.blocks import Block, Command

# Of a command that ends by itself; the longest roll out the agent.
_COMMAND_SECONDS = 5 * polling.PATIENCE_SECONDS
_POLL_SECONDS = 0.5
_END = "\x1e"
# A failure in the middle of a block counts, as with `set -e`, which would end the shell.
_PROLOGUE = "trap 'failed=$?' ERR\n"
_EPILOGUE = f"\nprintf '{_END}%d{_END}' \"$failed\"; failed=0\n"


class WalkError(AssertionError):
    """A command failed, did not end, or printed something else than its page shows."""


class Shell:
    """A bash in a session of its own, whose standard output and errors are one stream."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._type(f"failed=0\n{_PROLOGUE}")

    def run(self, command: str) -> tuple[int, str]:
        """Type a command; the status of its last failure, 0 if none, and its output."""
        self._type(command + _EPILOGUE)
        text = ""
        deadline = time.monotonic() + _COMMAND_SECONDS
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while text.count(_END) < 2:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WalkError(f"{command!r} does not end; it printed {text!r}")
                read = os.read(self._process.stdout.fileno(), 65536)
                if not read:
                    raise WalkError(f"{command!r} ended the shell; it printed {text!r}")
                text += read.decode(errors="replace")
        output, status, _ = text.split(_END, 2)
        return int(status), output

    def follow(self, block: Block) -> None:
        """Run a block's commands in turn. Raises `WalkError`.

        A command without output on the page must succeed. One with output is repeated until it
        prints that: what a reader who types sees is complete by then.
        """
        for command in block.commands():
            self._follow(block, command)

    def _follow(self, block: Block, command: Command) -> None:
        deadline = time.monotonic() + polling.PATIENCE_SECONDS
        while True:
            status, output = self.run(command.text)
            if command.output is None:
                if status:
                    raise WalkError(f"{block.place}: {command.text!r} fails: {status}, {output}")
                return
            if blocks.matches(command.output, output):
                return
            if time.monotonic() > deadline:
                raise WalkError(
                    f"{block.place}: {command.text!r} prints\n{output}\nand not\n{command.output}"
                )
            time.sleep(_POLL_SECONDS)

    def _type(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()


@contextlib.contextmanager
def started(
    command: list[str], directory: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[Shell]:
    """A shell, which ends with all that it started. command: ends in one that runs bash."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield Shell(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
