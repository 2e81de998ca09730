"""Runs the stage so that it leaves nothing behind, and shows its messages.

The stage is process 1 of a PID namespace, and ends when no process reads its messages. So
however this process ends (Ctrl-C, kill, kill -9), the kernel kills every process of the demo, and
removes its namespaces, mounts, pins, links and filters with them.

unshare(1), the stage's parent, is in the mount namespace, too, and ends after all of them.
Otherwise the last one unmounts the BPF file system in its exit, and waits there for a grace period
of RCU tasks, if tracing programs were pinned. Before Linux 6.9 (1612160b9127) that waits for
processes in their exit, and so for the stage, which waits for all others: no tracing program of the
machine could be detached any more.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import FrameType

import click
import msgspec

from agent.app import preflight
from agent.errors import PreflightError
from agent.lab import cgroups as lab_cgroups
from agent.lab import leftovers
from agent.operate.demo import events
from agent.operate.demo.view import View

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux"}
_INTERRUPTED_STATUS = 130
# The kernel frees BPF objects after an RCU grace period, namespaces in a work queue.
_FORGET_SECONDS = 10.0
_EXIT_SECONDS = 60


class DemoInterruptedError(Exception):
    """A signal interrupted the demo."""


def run(view: View) -> int:
    """Run the demo; the exit status: 0 only if all checks passed."""
    try:
        _check_machine()
    except PreflightError as error:
        click.echo(f"podgate: {error}", err=True)
        return 1
    try:
        with _signals_raise(), view:
            with lab_cgroups.own() as kubelet:
                left = _play(view, kubelet)
            if left is not None:
                view.add(_check_forgotten(left, kubelet))
    except DemoInterruptedError:
        click.echo(
            "podgate: interrupted; the kernel has removed all objects of the demo.",
            err=True,
        )
        return _INTERRUPTED_STATUS
    return 0 if view.has_passed else 1


def _check_machine() -> None:
    preflight.check()
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise PreflightError(f"{tool} is missing; install the package {package}.")


def _play(view: View, kubelet: pathlib.Path) -> events.Leftovers | None:
    """Run the stage to its end, with its messages shown by the view. kubelet: the stub's cgroup."""
    decoder = msgspec.json.Decoder(events.StageMessage)
    left = None
    stage = subprocess.Popen(
        [
            *("unshare", "--pid", "--mount-proc", "--fork", "--kill-child=KILL"),
            *(sys.executable, "-m", "agent.operate.demo.stage", str(kubelet)),
        ],
        env=os.environ | view.evidence_environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # Ctrl-C reaches this process only; the stage then ends as a whole.
        start_new_session=True,
    )
    assert stage.stdout is not None
    try:
        with stage.stdout:
            for line in stage.stdout:
                message = decoder.decode(line)
                if isinstance(message, events.Leftovers):
                    left = message
                else:
                    view.add(message)
        status = stage.wait()
        if status != 0:
            view.add(events.Check("stage exits by itself", "0", str(status), False))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            stage.wait(_EXIT_SECONDS)
        stage.kill()
        stage.wait()
    return left


def _check_forgotten(left: events.Leftovers, kubelet: pathlib.Path) -> events.Check:
    """Whether the kernel has removed every namespace and program of the stage."""
    deadline = time.monotonic() + _FORGET_SECONDS
    while True:
        programs = sum(leftovers.program_exists(program_id) for program_id in left.program_ids)
        namespaces = len(leftovers.remaining_namespaces(left.netns_cookies))
        if not (programs or namespaces) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    cgroups = int(kubelet.exists())
    observed = f"{programs} programs, {namespaces} namespaces, {cgroups} cgroups"
    expected = "0 programs, 0 namespaces, 0 cgroups"
    return events.Check("objects left in the kernel", expected, observed, observed == expected)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise DemoInterruptedError

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
