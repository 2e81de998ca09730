"""Compile processes. The programs that one pins appear all at once or not at all.

bcc maps 250 MB of LLVM, so only short-lived processes import it; the agent never does. If an agent
is killed, its compiler continues, and the next agent starts another: one waits for the other and
uses the programs that it pinned.
"""

import asyncio
import contextlib
import fcntl
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType

from bpf import errors, sources, syscalls

# A compile takes 0.2 s on an idle machine; a minute means that something is badly wrong.
_TIMEOUT_SECONDS = 60


async def ensure_pinned(
    directory: pathlib.Path, names: Collection[str], module: str, argument: str, *, what: str
) -> bool:
    """Run `python -m module argument` unless all of `names` are pinned. Whether it ran.

    what: names the programs in messages. Raises `CompileError`.
    """
    if are_pinned(directory, names):
        return False
    await _run(module, argument, what)
    return True


async def _run(module: str, argument: str, what: str) -> None:
    """Run a compile process (by vfork and exec, which is safe with threads).

    Raises `CompileError` with the last line that the process wrote to stderr.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, argument),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            _, messages = await process.communicate()
    except TimeoutError:
        raise errors.CompileError(
            f"compiling {what} took more than {_TIMEOUT_SECONDS} s; "
            "check whether the node is out of CPU or memory"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = messages.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else _status_text(process.returncode)
        first_error = next((line for line in lines[:-1] if "error:" in line), None)
        raise errors.CompileError(f"{reason} ({first_error})" if first_error else reason)


def are_pinned(directory: pathlib.Path, names: Collection[str]) -> bool:
    """Whether all of `names` exist in `directory`: an administrator may have removed one."""
    return all(os.path.lexists(directory / name) for name in names)


@contextlib.contextmanager
def pinning(directory: pathlib.Path, names: Collection[str]) -> Iterator[pathlib.Path | None]:
    """A directory to pin in, renamed to `directory` in one step if the block succeeds.

    None if another process, for which this one has waited, has pinned all of `names` there. Removes
    the unfinished directory of a killed process.
    """
    unfinished = directory.with_name(f"{directory.name}-unfinished")
    with _exclusive(directory.parent):
        if are_pinned(directory, names):
            yield None
            return
        for leftover in (unfinished, directory):
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir(mode=0o700)
        yield unfinished
        os.rename(unfinished, directory)


def compile_and_pin(
    directory: pathlib.Path,
    names: Collection[str],
    load: Callable[[ModuleType], tuple[object, Mapping[str, int]]],
    *,
    what: str,
    needs: str,
) -> None:
    """Pin the programs that `load` returns in `directory`, which appears only when complete.

    load: gets bcc; returns the owner of the descriptors, and the descriptors by name.
    what, needs: for messages: the programs, and what they need. Raises `CompileError` if the
    compiler or the verifier fails.
    """
    bcc = import_bcc()
    with pinning(directory, names) as unfinished:
        if unfinished is None:
            return
        try:
            _owner, descriptors = load(bcc)
            for name, fd in descriptors.items():
                syscalls.pin(fd, str(unfinished / name))
        except errors.PinError:
            raise
        except Exception as error:  # bcc raises plain Exception for every failure
            raise errors.CompileError(
                f"{what} could not be compiled or loaded: {error}; this needs {needs}"
            ) from error


def import_bcc() -> ModuleType:
    """bcc, set up for the stand-in headers. Raises `CompileError` when it is not installed."""
    os.environ["BCC_KERNEL_SOURCE"] = str(sources.KERNEL_SOURCE)
    try:
        import bcc
    except ImportError as error:
        raise errors.CompileError(
            "bcc is not installed for this Python; install the distribution's python3-bpfcc and "
            "use a virtual environment made with --system-site-packages"
        ) from error
    module: ModuleType = bcc
    return module


def main(compile_and_pin: Callable[[str], None]) -> int:
    """The main function of a compile process; returns its exit status.

    A failure is one sentence on stderr, after the compiler's messages.
    """
    try:
        compile_and_pin(sys.argv[1])
    except (errors.CompileError, errors.PinError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


@contextlib.contextmanager
def _exclusive(directory: pathlib.Path) -> Iterator[None]:
    """Hold the directory's lock; the kernel releases it when the process ends."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _status_text(status: int | None) -> str:
    """Why the compiler ended without a message: by a signal, usually for lack of memory."""
    if status is not None and status < 0:
        return (
            f"the compiler was killed by signal {-status}; it needs 250 MB of memory for a second, "
            "so raise the memory limit"
        )
    return f"the compiler ended with status {status}"
