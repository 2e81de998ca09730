"""Commands of the system: input in, output out, within a time limit."""

import asyncio
import contextlib
import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command that ended left. errors: its standard error output."""

    status: int
    output: str
    errors: str


async def run(*command: str, text: str = "", limit_seconds: float) -> CommandResult:
    """Run a command with `text` as its input; a command that takes longer is killed.

    Raises `TimeoutError`, or another `OSError` if it cannot be started (`FileNotFoundError`: there
    is none).
    """
    async with asyncio.timeout(limit_seconds):
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate(text.encode())
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # A killed process exits at once, or hangs in the kernel, where nothing can be done. Its
            # pipes are read to their ends, which closes them.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await process.communicate()
            raise
    assert process.returncode is not None
    return CommandResult(
        process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")
    )
