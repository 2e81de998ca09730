"""Calls of nft: what it gets, and how its errors are reported."""

import asyncio
import errno
import os
from typing import Any

import pytest

from agent.linux import commands, nft
from agent.linux.commands import CommandResult
from agent.linux.nft import NftError, NftMissingError
from bpf.netlink import RequestSocket, attribute


class Command:
    """nft, which ends with `result`, or cannot be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.result: CommandResult | Exception = CommandResult(0, "", "")
        self.calls: list[tuple[tuple[str, ...], str]] = []
        monkeypatch.setattr(commands, "run", self._run)

    async def _run(self, *command: str, text: str, limit_seconds: float) -> CommandResult:
        assert limit_seconds > 1
        self.calls.append((command, text))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(monkeypatch)


async def test_script_is_the_input_and_arguments_are_passed_on(command: Command) -> None:
    command.result = CommandResult(0, "table inet podgate\n", "a warning")
    await nft.apply("add table x")
    await nft.apply("add table y", only_check=True)
    assert await nft.query("-j", "list", "tables") == "table inet podgate\n"
    assert command.calls == [
        (("nft", "-f", "-"), "add table x"),
        (("nft", "-f", "-", "--check"), "add table y"),
        (("nft", "-j", "list", "tables"), ""),
    ]


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (
            CommandResult(
                1, "", "/dev/stdin:1:5-9: Error:  no such table \nadd x\n    ^^^\nError: b"
            ),
            *(NftError, "no such table"),
        ),
        (CommandResult(1, "output", "\nsegmentation fault\nmore"), NftError, "segmentation fault"),
        (CommandResult(-9, "", " \n"), NftError, "nft ended with -9"),
        (FileNotFoundError(), NftMissingError, "there is no nft command"),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
            *(NftError, "nft cannot be started (Permission denied)"),
        ),
        (TimeoutError("too long"), TimeoutError, "too long"),
    ],
)
async def test_failure_is_one_line_of_its_error(
    command: Command, result: CommandResult | Exception, kind: type[Exception], text: str
) -> None:
    command.result = result
    with pytest.raises(kind) as caught:
        await nft.apply("add table x")
    assert (type(caught.value), str(caught.value)) == (kind, text)


@pytest.mark.parametrize("closes", [False, True])
async def test_generation_is_that_of_the_ruleset_or_unknown(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    opened: list[Any] = []

    class Netlink(RequestSocket):
        def __init__(self, protocol: int) -> None:
            assert protocol == 12
            super().__init__()
            opened.append(self)

        def change(self, kind: int, flags: int, body: bytes) -> list[bytes]:
            assert (kind, flags, body) == (10 << 8 | 16, 0, bytes(4))
            if closes:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return [bytes(16) + b"nfgm" + attribute(2, bytes(4)) + attribute(1, b"\0\0\1\2")]

    monkeypatch.setattr(nft, "RequestSocket", Netlink)
    assert await nft.generation() == (None if closes else 0x102)
    with pytest.raises(OSError, match="Bad file descriptor"):
        opened[0]._socket.getsockname()


async def test_command_has_its_input_output_and_status() -> None:
    found = await commands.run(
        "sh", "-c", "cat; printf '\\377' >&2; exit 3", text="a", limit_seconds=60
    )
    assert found == CommandResult(3, "a", "\ufffd")
    with pytest.raises(FileNotFoundError):
        await commands.run("no-such-command", limit_seconds=60)


async def test_command_that_is_cancelled_is_killed_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of its output some is not read yet."""
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def note(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **options))
        running.set()
        return started[-1]

    running = asyncio.Event()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", note)
    before = os.listdir("/proc/self/fd")
    task = asyncio.create_task(commands.run("cat", "/dev/zero", limit_seconds=60))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [process.returncode for process in started] == [-9]
    # The transports close in the next turns.
    for _ in range(3):
        await asyncio.sleep(0)
    assert os.listdir("/proc/self/fd") == before
