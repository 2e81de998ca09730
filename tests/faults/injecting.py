"""How each kind of fault begins and ends."""

import contextlib
import os
import pathlib
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from tests.faults import node as nodes
from tests.faults import standins
from tests.faults.node import Node
from tests.faults.plans import Fault
from tests.polling import wait_until

_MS_RDONLY, _MS_REMOUNT = 1, 32
_FILLER = "filler"
_GARBAGE = bytes(range(256)) * 16


def inject(node: Node, fault: Fault) -> AbstractContextManager[None]:
    """A fault that lasts while the block runs."""
    return INJECTED[fault.kind](node, fault)


@contextlib.contextmanager
def _system_call(node: Node, fault: Fault) -> Iterator[None]:
    assert fault.rule is not None
    with node.injector.failing(fault.rule.in_directory(node.run_directory)):
        yield


@contextlib.contextmanager
def _descriptors(node: Node, fault: Fault) -> Iterator[None]:
    """A limit below the number of descriptors in use closes none."""
    pid = node.operator.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
    limit = {"none": 0, "those in use": used, "five more": used + 5}[fault.detail]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _run_directory(node: Node, fault: Fault) -> Iterator[None]:
    directory = node.run_directory
    if fault.detail == "read-only":
        _make_read_only(directory)
    elif fault.detail == "full":
        _fill(directory)
    else:
        with contextlib.suppress(OSError):
            for number in range(10_000):
                (directory / f"{_FILLER}{number}").touch()
    try:
        yield
    finally:
        if fault.detail == "read-only":
            assert nodes.mount_error(directory, "", _MS_REMOUNT) == 0
        for filler in directory.glob(f"{_FILLER}*"):
            filler.unlink()


def _make_read_only(directory: pathlib.Path) -> None:
    """Not while a file is being written."""

    def is_done() -> bool:
        return nodes.mount_error(directory, "", _MS_REMOUNT | _MS_RDONLY) == 0

    wait_until("a read-only directory", is_done)


def _fill(directory: pathlib.Path) -> None:
    with contextlib.suppress(OSError), (directory / _FILLER).open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@contextlib.contextmanager
def _relay(node: Node, fault: Fault) -> Iterator[None]:
    pid = max(node.relay_pids())
    if fault.detail == "killed":
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        yield
    else:
        with standins.stopped(pid):
            yield


@contextlib.contextmanager
def _api_server(node: Node, fault: Fault) -> Iterator[None]:
    if fault.detail == "stopped":
        with standins.stopped(node.api.pid):
            yield
        return
    node.api.send({"do": "break"})
    try:
        yield
    finally:
        node.api.send({"do": "mend"})


@contextlib.contextmanager
def _runtime(node: Node, fault: Fault) -> Iterator[None]:
    if fault.detail == "stopped":
        with standins.stopped(node.runtime.pid):
            yield
        return
    node.runtime.kill()
    try:
        yield
    finally:
        node.runtime.start_again()


@contextlib.contextmanager
def _damage(node: Node, fault: Fault) -> Iterator[None]:
    """A state file is read by the next agent."""
    name, _, how = fault.detail.partition(": ")
    node.operator.stop(signal.SIGKILL)
    _spoil(node.run_directory / name, how)
    node.start_agent()
    wait_until("the next agent", node.operator.report)
    yield


def _spoil(path: pathlib.Path, how: str) -> None:
    content = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    match how:
        case "empty":
            path.touch()
        case "half":
            path.write_bytes(content[: len(content) // 2])
        case "bytes":
            path.write_bytes(_GARBAGE)
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)


INJECTED: Mapping[str, Callable[[Node, Fault], AbstractContextManager[None]]] = {
    "system call": _system_call,
    "descriptors": _descriptors,
    "run directory": _run_directory,
    "relay": _relay,
    "API server": _api_server,
    "runtime": _runtime,
    "damage": _damage,
}
"""By kind."""

NAMED: Mapping[tuple[str, str], str] = {
    ("run directory", "full"): "state-not-written",
    ("run directory", "read-only"): "state-not-written",
    ("run directory", "no inodes"): "state-not-written",
    ("API server", "unavailable"): "watch-broken",
    ("runtime", "killed"): "runtime-unreachable",
    ("relay", "killed"): "relay-missing",
}
"""The finding that names a fault, by kind and detail, where it is of more than one component."""
