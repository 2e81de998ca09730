"""bpftool, as a process of the command line; the agent never starts one."""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from agent.errors import PodgateError

_TIMEOUT_SECONDS = 20

# A link that is not attached yet, or a cgroup that is removed meanwhile, ends bpftool's list.
_ATTEMPTS = 5
_PAUSE_SECONDS = 0.05


class BpftoolError(PodgateError):
    """bpftool is missing or failed; one sentence."""


def find() -> str:
    """Its path. Raises `BpftoolError`."""
    # Debian has it in /usr/sbin, which is not in every user's PATH.
    path = shutil.which("bpftool", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise BpftoolError(
            "bpftool is not installed; install the distribution's package bpftool (Debian; Ubuntu: "
            "linux-tools-common), or run the command in podgate's image."
        )
    return path


class Bpftool:
    """Runs bpftool and records the commands that succeeded."""

    def __init__(self) -> None:
        """Raises `BpftoolError`."""
        self._path = find()
        self.commands: list[str] = []

    def text(self, *arguments: str) -> str:
        """Its output for people. Raises `BpftoolError`."""
        return self._run(*arguments)

    def objects(self, *arguments: str) -> list[Mapping[str, Any]]:
        """Its JSON: a list of objects. Raises `BpftoolError`."""
        output = self._run("-j", *arguments)
        try:
            found: list[Mapping[str, Any]] = msgspec.json.decode(
                output or "[]", type=list[dict[str, Any]]
            )
        except msgspec.MsgspecError as error:
            raise BpftoolError(
                f"the output of '{self.commands[-1]}' is not as expected ({error})."
            ) from error
        return found

    def _run(self, *arguments: str) -> str:
        command = shlex.join(("bpftool", *arguments))
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            done = self._start(command, *arguments)
            if done.returncode == 0:
                self.commands.append(command)
                return done.stdout.decode(errors="replace")
        problem = (done.stderr or done.stdout).decode(errors="replace").strip()
        if problem in ("", "[]"):
            problem = f"status {done.returncode}; use the bpftool of this kernel's release"
        last = problem.splitlines()[-1]
        raise BpftoolError(f"'{command}' failed: {last}")

    def _start(self, command: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        try:
            return subprocess.run(
                [self._path, *arguments],
                check=False,
                capture_output=True,
                timeout=_TIMEOUT_SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise BpftoolError(f"'{command}' did not end within {_TIMEOUT_SECONDS} s.") from error
        except OSError as error:
            raise BpftoolError(f"'{command}' cannot be started ({error.strerror}).") from error
