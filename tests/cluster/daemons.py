"""Long-lived programs of the cluster, each in a cgroup of its own."""

import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Sequence

from tests import polling
from tests.runtime import node_cgroups


class Daemon:
    """One program, which can be stopped and started again."""

    def __init__(
        self,
        command: list[str],
        cgroup: pathlib.Path,
        log: pathlib.Path,
        *,
        name: str = "",
        within: Sequence[str] = (),
        has_children: bool = False,
    ) -> None:
        """cgroup: its directory, of version 2. It is made for each start and removed after the end,
        as systemd does, so each start has another cgroup id.

        within: the command that enters the namespaces of its machine, and stays outside the
        cgroup; has_children: what it started outlives it in its cgroup, as a runtime's shims do.
        """
        self.command = command
        self.name = name or pathlib.Path(command[0]).name
        self.cgroup = cgroup
        self.log = log
        self._within = tuple(within)
        self._has_children = has_children
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        if not self._within:
            return self._process.pid
        pid = self._process.pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert children, f"{self.name} has ended"
        return int(children[0])

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.is_running, f"{self.name} runs"
        self.cgroup.mkdir(parents=True, exist_ok=self._has_children)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._within, *node_cgroups.command_in(self.cgroup, self.command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal and wait for the end; nothing if it has ended."""
        if self._process is None:
            return
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        self._process.wait(polling.PATIENCE_SECONDS)
        self._process = None
        if not self._has_children:
            polling.wait_until(f"the cgroup of {self.name} is removed", self._is_removed)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """Stop it without an end: its sockets stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def check(self) -> None:
        """Raises `AssertionError`, with the end of its log, if it has ended."""
        assert self.is_running, f"{self.name} has ended: {self.last_lines()}"

    def last_lines(self, count: int = 15) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-count:])

    def _is_removed(self) -> bool:
        """A process that the daemon started may end a little later than it."""
        with contextlib.suppress(FileNotFoundError):
            try:
                self.cgroup.rmdir()
            except OSError:
                return False
        return True
