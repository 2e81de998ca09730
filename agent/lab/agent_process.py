"""An agent of the lab: its manifests, its process, its status and its log."""

import asyncio
import contextlib
import datetime
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol, TypeVar

import msgspec

from agent import labels
from agent.admin import client as admin_client
from agent.admin.report import AgentReport, PodStatus
from agent.errors import AgentRequestError
from agent.lab import attempts
from agent.lab.agent_log import AgentLog, Line
from agent.lab.lab import BPFFS, LAB_DIRECTORY, LabPod
from agent.lab.polling import TimedOutError, patience_seconds
from agent.logs import Event
from agent.pods.conditions import Condition
from agent.settings import admin_socket

# How late the exit of an agent that is to log something is noticed.
_EXIT_SECONDS = 1.0
# A report costs agent and reader some ms, and most changes of it come with an event of the log.
# Events come in bursts, of which each would lead to a report.
_REPORT_SECONDS = 0.1
_BURST_SECONDS = 0.02

T = TypeVar("T")


class Process(Protocol):
    """What an agent's process can do, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""


class Launch(Protocol):
    """Starts `podgate ARGUMENTS`."""

    def __call__(
        self, arguments: Sequence[str], log: IO[bytes], errors: IO[bytes] | None = None, /
    ) -> Process:
        """log: an open file as stdout; errors: as stderr, the same one if None."""


def execute(
    arguments: Sequence[str],
    log: IO[bytes],
    errors: IO[bytes] | None = None,
    /,
    directory: pathlib.Path | None = None,
) -> Process:
    """A `Launch`: a new interpreter. directory: with packages of another version."""
    return subprocess.Popen(
        [sys.executable, "-m", "agent", *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=errors or log,
    )


def run(launch: Launch, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of podgate to its end. Raises `subprocess.TimeoutExpired`."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = launch(arguments, output, errors)
        try:
            status = process.wait(timeout=patience_seconds())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())


class AgentProcess:
    """One directory of manifests, and `podgate run` with it."""

    def __init__(
        self,
        directory: pathlib.Path = LAB_DIRECTORY,
        bpffs: pathlib.Path = BPFFS,
        launch: Launch = execute,
    ) -> None:
        """directory: for manifests, run directory and log."""
        self.manifests = directory / "manifests"
        self.run_directory = directory / "run"
        self.log = directory / "agent.log"
        self.bpffs = bpffs
        self.pods_from: tuple[str, ...] = ("--manifests", str(self.manifests))
        """Options for the source of pods."""
        self.kubelet: tuple[str, ...] = ()
        """Options for the kubelet."""
        self.launch = launch
        """Starts agents."""
        self.launch_command = launch
        """Starts other commands."""
        self.manifests.mkdir()
        self.events = AgentLog(self.log)
        self._process: Process | None = None

    def write_manifest(
        self,
        pod: LabPod,
        *,
        mode: str | None,
        container: dict[str, Any],
        addresses: Sequence[str] = (),
    ) -> None:
        """Write (or replace, in one step) the pod's manifest. addresses: as its status.podIPs."""
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod.name,
                "namespace": "demo",
                "labels": {labels.MODE_LABEL: mode} if mode else {},
                "annotations": {labels.NETNS_ANNOTATION: pod.netns.path},
            },
            "spec": {"containers": [{"name": "app", "image": "none", **container}]},
            "status": {"podIPs": [{"ip": address} for address in addresses]},
        }
        self.write_file(f"{pod.name}.yaml", json.dumps(manifest, indent=2))

    def write_file(self, name: str, content: str) -> None:
        """Write any file into the manifest directory, in one step."""
        unfinished = self.manifests / f".{name}"
        unfinished.write_text(content, encoding="utf-8")
        unfinished.rename(self.manifests / name)

    def start(self, *extra: str) -> None:
        """Start the agent. extra: more options of `podgate run`."""
        self.start_in(None, *extra)

    def start_in(self, directory: pathlib.Path | None, *extra: str) -> None:
        """Start it with packages from `directory`, if there are any: another version."""
        arguments = [
            "run",
            *self.pods_from,
            *self.kubelet,
            *("--run-directory", str(self.run_directory)),
            *("--bpffs", str(self.bpffs)),
            *("--http-address", "127.0.0.1:0"),
            *("--watchdog-seconds", f"{patience_seconds():g}"),
            *extra,
        ]
        with self.log.open("ab") as log:
            if directory is None:
                self._process = self.launch(arguments, log)
            else:
                self._process = execute(arguments, log, directory=directory)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run another command of podgate to its end."""
        done = run(self.launch_command, *arguments)
        output, errors = done.stdout.decode(), done.stderr.decode()
        return subprocess.CompletedProcess(done.args, done.returncode, output, errors)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def cleanup(self) -> "subprocess.CompletedProcess[str]":
        """Run `podgate cleanup`."""
        where = ("--run-directory", str(self.run_directory), "--bpffs", str(self.bpffs))
        return self.run("cleanup", *where)

    def stop(self, number: signal.Signals) -> None:
        """Send the signal and wait for the exit."""
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(timeout=patience_seconds())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TimedOutError(f"the agent did not exit on {number.name}") from None
        self._process = None

    def report(self) -> AgentReport | None:
        """The agent's report; None while it does not respond."""
        with contextlib.suppress(AgentRequestError):
            content = asyncio.run(admin_client.fetch(admin_socket(self.run_directory), "/status"))
            return msgspec.json.decode(content, type=AgentReport)
        return None

    def wait_for(self, what: str, holds: Callable[[AgentReport], bool]) -> AgentReport:
        """Read the report after events of the log until `holds`. Raises `TimedOutError`."""

        def check() -> AgentReport | None:
            report = self.report()
            return report if report and holds(report) else None

        return self._await(what, check, _REPORT_SECONDS, _BURST_SECONDS)

    def event(self, event: Event, **fields: Any) -> Line:
        """Wait until the agent logs this event with these fields. Raises `TimedOutError`.

        Lines from before the call count, too; each answers one such call.
        """
        what = " ".join([event.key, *(f"{name}={value}" for name, value in fields.items())])
        return self._await(what, lambda: self.events.next(event, fields), patience_seconds())

    def _await(
        self,
        what: str,
        check: Callable[[], T | None],
        pause_seconds: float,
        burst_seconds: float = 0,
    ) -> T:
        """Call `check` after each event, and after each pause, until it returns something.

        burst_seconds: events that follow another one so soon have one call together.
        """
        deadline = time.monotonic() + patience_seconds()
        with self.events.watch() as watch:
            while (remaining := deadline - time.monotonic()) > 0:
                has_ended = self._process is not None and self._process.poll() is not None
                if (found := check()) is not None:
                    return found
                if has_ended:
                    break
                if watch.wait(min(remaining, pause_seconds, _EXIT_SECONDS)) and burst_seconds:
                    time.sleep(burst_seconds)
                    watch.wait(0)
        raise TimedOutError(
            f"no {what} in time; the agent's last lines: {self.events.tail()}; its tasks and "
            f"threads:\n{self._stacks()}"
        )

    def _stacks(self) -> str:
        path = admin_socket(self.run_directory)
        try:
            return asyncio.run(admin_client.fetch(path, "/stacks")).decode()
        except AgentRequestError as error:
            return str(error)

    def log_lines(self, event: Event | None = None) -> list[Line]:
        """Decoded lines of the agent's log: all, or those of one event."""
        return self.events.lines(event)


def pod_of(report: AgentReport, name: str) -> PodStatus | None:
    return next((pod for pod in report.pods if pod.name == name), None)


def drop_result(report: AgentReport) -> str:
    """The result of a dropped connect: by a hook if the kernel has it, else by the gate."""
    is_hooked = all(hook.problem is None for hook in report.hooks if "connect" in hook.name)
    return attempts.REFUSED if is_hooked else attempts.DROPPED


def condition_of(report: AgentReport, name: str, kind: str) -> Condition | None:
    pod = pod_of(report, name)
    conditions = pod.conditions if pod else []
    return next((condition for condition in conditions if condition.type == kind), None)


def are_all_isolated(report: AgentReport, *, names: Sequence[str], reason: str) -> bool:
    """Whether the condition isolation-ready of all these pods has this reason."""
    found = [condition_of(report, name, labels.ISOLATION_READY) for name in names]
    return all(condition and condition.reason == reason for condition in found)


def packets(report: AgentReport, name: str, verdict: str) -> int:
    """Host packets to a pod with this verdict, over all reasons except strays."""
    pod = pod_of(report, name)
    return sum(
        count
        for gate in (pod.gates if pod else [])
        for reason, count in gate.packets.get(verdict, {}).items()
        if reason != "stray"
    )


def log_time(line: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(line["time"])
