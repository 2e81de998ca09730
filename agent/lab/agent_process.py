"""What a node's operator does in the demo: write manifests, run the agent, ask for its status."""

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
from typing import Any

import msgspec

from agent import labels
from agent.admin import client as admin_client
from agent.admin.report import AgentReport, PodStatus
from agent.lab import attempts
from agent.lab.lab import BPFFS, LAB_DIRECTORY, LabPod
from agent.pods.conditions import Condition
from agent.settings import admin_socket

# A multiple for machines emulated in software (make test-kernels), where all takes twenty times as
# long as elsewhere.
_PATIENCE_SECONDS = 60 * float(os.environ.get("PODGATE_TEST_PATIENCE", "1"))
_POLL_SECONDS = 0.02


class GaveUp(Exception):
    """Something did not come true in time; the message says what, with the agent's last lines."""


class Operator:
    """One node's directory of manifests and its own `podgate run`."""

    def __init__(
        self, directory: pathlib.Path = LAB_DIRECTORY, bpffs: pathlib.Path = BPFFS
    ) -> None:
        """directory: manifests, run directory and log are made below it."""
        self.manifests = directory / "manifests"
        self.run_directory = directory / "run"
        self.log = directory / "agent.log"
        self.bpffs = bpffs
        self.pods_from: tuple[str, ...] = ("--manifests", str(self.manifests))
        """Where the agent is told that pods come from."""
        self.manifests.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

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
        """Start the agent; `extra` are more arguments of `podgate run`."""
        self.start_in(None, *extra)

    def start_in(self, directory: pathlib.Path | None, *extra: str) -> None:
        """Start it where its packages are looked for in `directory` first: another version."""
        arguments = [
            *self.pods_from,
            *("--run-directory", str(self.run_directory)),
            *("--bpffs", str(self.bpffs)),
            *("--http-address", "127.0.0.1:0"),
            *extra,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agent", "run", *arguments],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run another of podgate's commands to its end."""
        return subprocess.run(
            [sys.executable, "-m", "agent", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def cleanup(self) -> "subprocess.CompletedProcess[str]":
        """Run `podgate cleanup`."""
        where = ("--run-directory", str(self.run_directory), "--bpffs", str(self.bpffs))
        return self.run("cleanup", *where)

    def stop(self, number: signal.Signals) -> None:
        """Send the signal and wait for the end."""
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise GaveUp(f"the agent did not end on {number.name}") from None
        self._process = None

    def report(self) -> AgentReport | None:
        """The agent's own report, or None while it does not answer."""
        with contextlib.suppress(admin_client.AgentUnreachableError):
            content = asyncio.run(admin_client.fetch(admin_socket(self.run_directory), "/status"))
            return msgspec.json.decode(content, type=AgentReport)
        return None

    def wait_for(self, what: str, holds: Callable[[AgentReport], bool]) -> AgentReport:
        """Ask again and again until `holds`. Raises `GaveUp`."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if (report := self.report()) and holds(report):
                return report
            if self._process is not None and self._process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        raise GaveUp(f"{what} did not come true; the agent's last lines: {_tail(self.log)}")

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """The agent's log, decoded."""
        for line in self.log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def pod_of(report: AgentReport, name: str) -> PodStatus | None:
    return next((pod for pod in report.pods if pod.name == name), None)


def refusal(report: AgentReport) -> str:
    """How an attempt to connect to a pod ends that refuses: by a hook, where the kernel has it."""
    is_hooked = all(hook.problem is None for hook in report.hooks if "connect" in hook.name)
    return attempts.REFUSED if is_hooked else attempts.DROPPED


def condition_of(report: AgentReport, name: str, kind: str) -> Condition | None:
    pod = pod_of(report, name)
    conditions = pod.conditions if pod else []
    return next((condition for condition in conditions if condition.type == kind), None)


def packets(report: AgentReport, name: str, verdict: str) -> int:
    """Node-sent packets of a pod with this verdict, over all reasons but strays."""
    pod = pod_of(report, name)
    return sum(
        count
        for gate in (pod.gates if pod else [])
        for reason, count in gate.packets.get(verdict, {}).items()
        if reason != "stray"
    )


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    """Look again and again until it holds. Raises `GaveUp`."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise GaveUp(f"{what}: not within {_PATIENCE_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def log_time(line: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(line["time"])


def _tail(path: pathlib.Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return " / ".join(lines[-3:]) or "none"
