"""The nft command: one script in, one transaction done or nothing.

The command, not its library: the library's calls cannot be given up, and a commit can wait for as
long as another holds the kernel's lock; a child process can be killed. It also keeps a crash in
netlink parsing out of the agent. A call costs 3 to 6 ms, next to the 10 to 20 of attaching a gate.
"""

import asyncio
import contextlib

# A commit waits for an RCU grace period and for other writers; kube-proxy's largest take seconds.
_TIMEOUT_SECONDS = 20.0


class NftError(Exception):
    """nft or the kernel said no; nothing was changed. The message is one line of what it said."""


class NftMissing(NftError):
    """There is no nft command on this machine."""


async def apply(script: str, *, only_check: bool = False) -> None:
    """Do all of the script, or nothing of it. Raises `NftError` or `TimeoutError`."""
    await _run(["-f", "-", *(["--check"] if only_check else [])], script)


async def ask(*arguments: str) -> str:
    """What nft prints. Raises `NftError` or `TimeoutError`."""
    return await _run(list(arguments), "")


async def _run(arguments: list[str], script: str) -> str:
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        try:
            process = await asyncio.create_subprocess_exec(
                "nft",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except FileNotFoundError as error:
            raise NftMissing("there is no nft command") from error
        except OSError as error:
            raise NftError(f"nft cannot be started ({error.strerror})") from error
        try:
            output, errors = await process.communicate(script.encode())
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # A killed process ends at once, or hangs in the kernel where nobody could help it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await process.wait()
            raise
    if process.returncode != 0:
        raise NftError(_first_error(errors.decode(errors="replace"), process.returncode))
    return output.decode(errors="replace")


def _first_error(text: str, code: int | None) -> str:
    for line in text.splitlines():
        _, found, message = line.partition("Error: ")
        if found:
            return message.strip()
    return text.strip().partition("\n")[0] or f"nft ended with {code}"
