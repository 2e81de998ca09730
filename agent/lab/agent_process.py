"""An agent of the lab: its manifests, its process, its status and its log."""

import asyncio
import contextlib
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Protocol

import msgspec

from agent import labels
from agent.admin import client as admin_client
from agent.admin.report import AgentReport, PodStatus
from agent.errors import AgentRequestError, PodgateError
from agent.lab import attempts
from agent.lab.lab import BPFFS, LAB_DIRECTORY, LabPod
from agent.logs import Event
from agent.pods.conditions import Condition
from agent.settings import admin_socket

# A multiple for machines emulated in software (make test-kernels), which are twenty times as slow.
_PATIENCE_SECONDS = 60 * float(os.environ.get("PODGATE_TEST_PATIENCE", "1"))
_POLL_SECONDS = 0.02


class LabTimeoutError(PodgateError):
    """A condition was not met in time."""


class Process(Protocol):
    """What an agent's process can do, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""


Launch = Callable[[Sequence[str], IO[bytes]], Process]
"""Starts `podgate ARGUMENTS` with an open file as stdout and stderr."""


def execute(
    arguments: Sequence[str], log: IO[bytes], directory: pathlib.Path | None = None
) -> Process:
    """A `Launch`: a new interpreter. directory: with packages of another version."""
    return subprocess.Popen(
        [sys.executable, "-m", "agent", *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


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
        self.manifests.mkdir()
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
            *("--watchdog-seconds", str(_PATIENCE_SECONDS)),
            *extra,
        ]
        with self.log.open("ab") as log:
            if directory is None:
                self._process = self.launch(arguments, log)
            else:
                self._process = execute(arguments, log, directory)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run another command of podgate to its end."""
        return subprocess.run(
            [sys.executable, "-m", "agent", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )

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
            self._process.wait(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise LabTimeoutError(f"the agent did not exit on {number.name}") from None
        self._process = None

    def report(self) -> AgentReport | None:
        """The agent's report; None while it does not respond."""
        with contextlib.suppress(AgentRequestError):
            content = asyncio.run(admin_client.fetch(admin_socket(self.run_directory), "/status"))
            return msgspec.json.decode(content, type=AgentReport)
        return None

    def wait_for(self, what: str, holds: Callable[[AgentReport], bool]) -> AgentReport:
        """Poll the report until `holds`. Raises `LabTimeoutError`."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if (report := self.report()) and holds(report):
                return report
            if self._process is not None and self._process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        raise LabTimeoutError(f"no {what} in time; the agent's last lines: {_tail(self.log)}")

    def log_lines(self, event: Event | None = None) -> Iterator[dict[str, Any]]:
        """Decoded lines of the agent's log: all, or those of one event."""
        for text in self.log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if event is None or line["event"] == event.key:
                    yield line


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


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    """Poll until `holds`. Raises `LabTimeoutError`."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise LabTimeoutError(f"no {what} within {_PATIENCE_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def log_time(line: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(line["time"])


def _tail(path: pathlib.Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return " / ".join(lines[-3:]) or "none"
