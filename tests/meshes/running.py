"""Programs of a mesh that run in pods of a test, until the test ends."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from agent.lab.lab import LabPod
from tests.polling import wait_until

_TAIL = 2000
_RULES_SECONDS = 120


class MeshProcess:
    """One of them. Its output is in a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path):
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        """That it still runs."""
        assert self._process.poll() is None, f"it exited: {self.tail()}"

    def tail(self) -> str:
        """The end of its output."""
        return self._log.read_text(errors="replace")[-_TAIL:]


class MeshProcesses:
    """All of a test."""

    def __init__(self, folder: pathlib.Path) -> None:
        """folder: for their output, and for files that all users may read."""
        self.folder = folder
        self.undo = contextlib.ExitStack()
        """What is kept until all of them have ended."""
        self._started: list[MeshProcess] = []

    def start(
        self,
        pod: LabPod,
        command: Sequence[str],
        *,
        user: int = 0,
        capabilities: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> MeshProcess:
        """In the pod. user: also its group's id; capabilities: that the user keeps, as `setpriv`
        names them."""
        as_user: list[str] = []
        if user:
            as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        if capabilities:
            as_user += [f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}"]
        log = self.folder / f"{pod.name}-{len(self._started)}.log"
        made = MeshProcess(
            ["nsenter", f"--net={pod.netns.path}", *as_user, *command], environment or {}, log
        )
        self._started.append(made)
        return made

    def close(self) -> None:
        with self.undo:
            for process in self._started:
                process.kill()


@contextlib.contextmanager
def mesh_processes(folder: pathlib.Path) -> Iterator[MeshProcesses]:
    made = MeshProcesses(folder)
    try:
        yield made
    finally:
        made.close()


def run_in(pod: LabPod, *command: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command in the pod to its end."""
    run("nsenter", f"--net={pod.netns.path}", *command, environment=environment)


def run(*command: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, in this network namespace."""
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=_RULES_SECONDS,
        check=False,
    )
    output = (done.stdout + done.stderr)[-_TAIL:]
    assert done.returncode == 0, f"{' '.join(command)} failed: {output}"


def wait_for_listener(pod: LabPod, port: int, process: MeshProcess) -> None:
    """Until a process of the pod listens at this port of the loopback or all addresses."""

    def listens() -> bool:
        process.check()
        lines = pod.netns.read_proc_net("tcp").splitlines()
        lines += pod.netns.read_proc_net("tcp6").splitlines()
        # Local address and port in hexadecimal digits; 0A is TCP_LISTEN (include/net/tcp_states.h).
        fields = [line.split() for line in lines]
        return any(
            found[1].endswith(f":{port:04X}") and found[3] == "0A"
            for found in fields
            if len(found) > 3
        )

    wait_until(f"a listener at port {port} of {pod.name}", listens)
