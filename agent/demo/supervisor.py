"""Runs the stage so that it leaves nothing behind, and shows its messages.

The stage is process 1 of a PID namespace. The kernel kills it with its parent, and the parent with
this process. So whichever ends first, and however (Ctrl-C, kill, kill -9), the kernel kills every
process of the demo, and removes its namespaces, mounts, pins, links and filters with them.
"""

import contextlib
import os
import pathlib
import select
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
from agent.demo import events
from agent.demo.view import View
from agent.errors import PreflightError
from agent.lab import cgroups as lab_cgroups
from agent.lab import leftovers

_TOOLS = {"unshare": "util-linux", "setpriv": "util-linux", "nsenter": "util-linux"}
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
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
            *(sys.executable, "-m", "agent.demo.stage", str(kubelet)),
        ],
        env=os.environ | view.evidence_environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # Ctrl-C reaches this process only; the stage then dies as a whole.
        start_new_session=True,
    )
    assert stage.stdout is not None
    mounts = contextlib.ExitStack()
    try:
        with stage.stdout:
            for number, line in enumerate(stage.stdout):
                if number == 0:  # sent from its own mount namespace
                    mounts.enter_context(_held_mounts(stage.pid))
                message = decoder.decode(line)
                if isinstance(message, events.Leftovers):
                    left = message
                else:
                    view.add(message)
        status = stage.wait()
        if status != 0:
            view.add(events.Check("stage exits by itself", "0", str(status), False))
    finally:
        stage.kill()
        stage.wait()
        mounts.close()
    return left


@contextlib.contextmanager
def _held_mounts(parent: int) -> Iterator[None]:
    """Keep the stage's mounts until all of its processes have ended. parent: the stage's.

    Without this the last of these unmounts the BPF file system in its exit, and waits there for a
    grace period of RCU tasks, if tracing programs were pinned. Before Linux 6.9 (1612160b9127) that
    waits for processes in exit, one of which, the first of the PID namespace, waits for the others:
    no tracing program of the machine could be detached any more.
    """
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    with contextlib.ExitStack() as descriptors:
        ends = select.poll()
        for child in children:
            process = os.pidfd_open(int(child))
            descriptors.callback(os.close, process)
            ends.register(process, select.POLLIN)
            mounts = os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            descriptors.callback(os.close, mounts)
        yield
        ends.poll(_EXIT_SECONDS * 1000)


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
