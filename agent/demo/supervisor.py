"""Runs the stage where it can leave nothing behind, and shows what it tells.

The stage is process 1 of a PID namespace, told by the kernel to die with its parent, which dies
with this process. So whatever ends first, and however (Ctrl-C, kill, kill -9), the kernel ends
every process of the demo, and with them go its namespaces, mounts, pins, links and filters.
"""

import contextlib
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
from agent.demo import events
from agent.demo.view import JsonView, TextView, View
from agent.errors import PreflightError
from agent.lab import cgroups as lab_cgroups
from agent.lab import leftovers

_TOOLS = {"unshare": "util-linux", "setpriv": "util-linux", "nsenter": "util-linux"}
_INTERRUPTED_STATUS = 130
# The kernel frees BPF objects after an RCU grace period, namespaces in a work queue.
_FORGET_SECONDS = 10.0


class Interrupted(Exception):
    """A signal asked the demo to end."""


def run(output: str) -> int:
    """Run the demo; the exit status: 0 only if every promise held."""
    view: View = JsonView() if output == "json" else TextView()
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
                view.take(_check_forgotten(left, kubelet))
    except Interrupted:
        click.echo("podgate: interrupted; the kernel has removed all that the demo made.", err=True)
        return _INTERRUPTED_STATUS
    return 0 if view.held else 1


def _check_machine() -> None:
    preflight.check()
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise PreflightError(f"{tool} is missing; install the package {package}.")


def _play(view: View, kubelet: pathlib.Path) -> events.Traces | None:
    """Run the stage to its end, handing its events to the view. kubelet: the stand-in's cgroup."""
    decoder = msgspec.json.Decoder(events.Event)
    left = None
    stage = subprocess.Popen(
        [
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
            *(sys.executable, "-m", "agent.demo.stage", str(kubelet)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # Ctrl-C reaches this process only; the stage then dies as a whole.
        start_new_session=True,
    )
    assert stage.stdout is not None
    try:
        with stage.stdout:
            for line in stage.stdout:
                event = decoder.decode(line)
                if isinstance(event, events.Traces):
                    left = event
                else:
                    view.take(event)
        status = stage.wait()
        if status != 0:
            view.take(events.Check("the stage ended by itself", "0", str(status), False))
    finally:
        stage.kill()
        stage.wait()
    return left


def _check_forgotten(left: events.Traces, kubelet: pathlib.Path) -> events.Check:
    """Whether the kernel has let go of every namespace and program of the stage."""
    deadline = time.monotonic() + _FORGET_SECONDS
    while True:
        programs = sum(leftovers.program_exists(program_id) for program_id in left.program_ids)
        namespaces = len(set(leftovers.living_namespaces()) & set(left.netns_inodes))
        if not (programs or namespaces) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    cgroups = int(kubelet.exists())
    observed = f"{programs} programs, {namespaces} namespaces, {cgroups} cgroups"
    expected = "0 programs, 0 namespaces, 0 cgroups"
    return events.Check("left in the kernel", expected, observed, observed == expected)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
