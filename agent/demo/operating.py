"""What a node's operator does in the demo: write manifests, run the agent, ask for its status."""

import contextlib
import datetime
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from agent import adminclient, names
from agent.conditions import Condition
from agent.demo.lab import BPFFS, LAB_DIRECTORY, LabPod
from agent.settings import admin_socket
from agent.status import PodStatus, Report

MANIFESTS = LAB_DIRECTORY / "manifests"
RUN_DIRECTORY = LAB_DIRECTORY / "run"
LOG = LAB_DIRECTORY / "agent.log"

_PATIENCE_SECONDS = 20
_POLL_SECONDS = 0.02


class GaveUp(Exception):
    """Something did not come true in time; the message says what, with the agent's last lines."""


def write_manifest(pod: LabPod, *, mode: str | None, container: dict[str, Any]) -> None:
    """Write (or replace, in one step) the pod's manifest."""
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod.name,
            "namespace": "demo",
            "labels": {names.MODE_LABEL: mode} if mode else {},
            "annotations": {names.NETNS_ANNOTATION: pod.netns.path},
        },
        "spec": {"containers": [{"name": "app", "image": "none", **container}]},
    }
    MANIFESTS.mkdir(exist_ok=True)
    unfinished = MANIFESTS / f".{pod.name}"
    unfinished.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    unfinished.rename(MANIFESTS / f"{pod.name}.yaml")


class AgentProcess:
    """A real `podgate run` of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = [
            *("--manifests", str(MANIFESTS)),
            *("--run-directory", str(RUN_DIRECTORY)),
            *("--bpffs", str(BPFFS)),
        ]
        with LOG.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agent", "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

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

    def report(self) -> Report | None:
        """The agent's own report, or None while it does not answer."""
        import asyncio

        with contextlib.suppress(adminclient.Unreachable):
            content = asyncio.run(adminclient.fetch(admin_socket(RUN_DIRECTORY), "/status"))
            return msgspec.json.decode(content, type=Report)
        return None

    def wait_for(self, what: str, holds: Callable[[Report], bool]) -> Report:
        """Ask again and again until `holds`. Raises `GaveUp`."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if (report := self.report()) and holds(report):
                return report
            if self._process is not None and self._process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        raise GaveUp(f"{what} did not come true; the agent's last lines: {_tail(LOG)}")


def pod_of(report: Report, name: str) -> PodStatus | None:
    return next((pod for pod in report.pods if pod.name == name), None)


def condition_of(report: Report, name: str, kind: str) -> Condition | None:
    pod = pod_of(report, name)
    conditions = pod.conditions if pod else []
    return next((condition for condition in conditions if condition.type == kind), None)


def packets(report: Report, name: str, verdict: str) -> int:
    """Node-sent packets of a pod with this verdict, over all reasons but strays."""
    pod = pod_of(report, name)
    return sum(
        count
        for gate in (pod.gates if pod else [])
        for reason, count in gate.packets.get(verdict, {}).items()
        if reason != "stray"
    )


def log_lines() -> Iterator[dict[str, Any]]:
    """The agent's log, decoded."""
    for line in LOG.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def log_time(line: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(line["time"])


def _tail(path: pathlib.Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return " / ".join(lines[-3:]) or "none"
