"""Forked agents behave as executed ones, and do not outlive their worker."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import pytest

from agent.lab import agent_process
from agent.lab.agent_process import AgentProcess, Launch, Process, execute
from tests import polling

pytestmark = pytest.mark.kernel

_WORKER = """
import sys, time
from tests.forkserver import ForkServer
server = ForkServer()
server.start(sys.argv[1:], sys.stderr.buffer)
time.sleep(600)
"""


def run(launch: Launch, log: pathlib.Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    with log.open("wb") as file:
        status = launch(arguments, file).wait(polling.PATIENCE_SECONDS)
    return status, log.read_text(encoding="utf-8")


@pytest.fixture
def started(operator: AgentProcess, launch: Launch) -> Process:
    """The process of an agent that has synced."""
    processes = []

    def recording(
        arguments: Sequence[str], log: IO[bytes], errors: IO[bytes] | None = None, /
    ) -> Process:
        processes.append(launch(arguments, log, errors))
        return processes[0]

    operator.launch = recording
    operator.start()
    operator.wait_for("an agent", lambda report: report.is_synced)
    return processes[0]


@pytest.mark.parametrize(
    "arguments", [("--version",), ("status", "--run-directory", "none"), ("run",), ("none",)]
)
def test_output_and_exit_status_are_those_of_a_new_process(
    launch: Launch, tmp_path: pathlib.Path, arguments: tuple[str, ...]
) -> None:
    log = tmp_path / "log"
    assert run(launch, log, *arguments) == run(execute, log, *arguments)
    forked, executed = agent_process.run(launch, *arguments), agent_process.run(execute, *arguments)
    assert (forked.stdout, forked.stderr) == (executed.stdout, executed.stderr)


@pytest.mark.parametrize("arguments", [("--version",), ("--no-such-option",)])
def test_output_that_cannot_be_written_ends_it_as_a_new_process(
    launch: Launch, arguments: tuple[str, ...]
) -> None:
    with open("/dev/full", "wb") as full:
        forked, executed = (
            start(arguments, full).wait(polling.PATIENCE_SECONDS) for start in (launch, execute)
        )
    assert forked == executed != 0


def test_environment_is_the_workers_at_the_start(
    launch: Launch, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("run", "--bpffs", str(tmp_path), "--run-directory", str(tmp_path / "run"))
    assert "use one of --node-name NAME" in run(launch, tmp_path / "log", *command)[1]
    monkeypatch.setenv("NODE_NAME", "node1")
    assert "is not a BPF file system" in run(launch, tmp_path / "log", *command)[1]


def test_directory_is_the_workers_at_the_start(
    launch: Launch, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some").mkdir()
    monkeypatch.chdir(tmp_path)
    command = ("run", "--manifests", "some", "--bpffs", str(tmp_path), "--run-directory", "run")
    assert "is not a BPF file system" in run(launch, tmp_path / "log", *command)[1]


def test_it_reads_nothing_and_writes_to_its_log(started: Process, operator: AgentProcess) -> None:
    files = [os.readlink(f"/proc/{started.pid}/fd/{number}") for number in range(3)]
    assert files == ["/dev/null", str(operator.log), str(operator.log)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_worker_stops_it_and_gets_its_exit_status(
    started: Process, operator: AgentProcess, number: signal.Signals
) -> None:
    assert started.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(timeout=0)
    operator.stop(number)
    assert started.wait() == started.poll() == (0 if number is signal.SIGTERM else -number)
    # Nothing can be sent to a process that has the same number since.
    started.kill()


def test_no_agent_outlives_its_worker(operator: AgentProcess) -> None:
    workers = []

    def launch_by_another_worker(
        arguments: Sequence[str], log: IO[bytes], errors: IO[bytes] | None = None, /
    ) -> Process:
        command = [sys.executable, "-c", _WORKER, *arguments]
        workers.append(subprocess.Popen(command, stderr=log))
        return workers[0]

    operator.launch = launch_by_another_worker
    operator.start()
    (worker,) = workers
    with worker:
        try:
            pid = operator.wait_for("an agent", lambda report: report.is_synced).pid
            assert pid != worker.pid
        finally:
            worker.kill()
    polling.wait_until("its end", lambda: not pathlib.Path(f"/proc/{pid}").exists())
