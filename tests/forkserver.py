"""Agents, and commands, that are forked from a process which has imported podgate.

Importing is more than half of the CPU time of a test's agent, and all of a command's. The suite
starts several hundred.
So each worker has one process that imports once and then forks, `python -m tests.forkserver FD`. It
has one thread and runs no part of podgate: its fork is what a new process is after the imports.

The worker stops what it started, and waits for it, as with `subprocess.Popen`. When the worker
dies, its socket closes, the server exits, and the kernel kills what the server forked. A fork runs
on the node of the test that started it (tests/nodes).

Not for tests of the command line or the environment in /proc, of memory, of variables that Python
itself reads, or of how an agent starts: `agent_process.execute` is.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

from tests.nodes import node

_COMMANDS = ("bugtool", "cleanup", "doctor", "drops", "explain", "off", "pods", "run", "status")
_VIEWS = ("doctor", "explain", "pinned_status", "pods", "status")
_MODULES = (
    *("kubernetes.aio.client", "kubernetes.aio.config"),  # of agents with a kubeconfig
    *("agent.app.http_server", "agent.app.preflight", "agent.app.removal", "agent.app.startup"),
    *("agent.linux.malloc", "agent.linux.scheduling", "agent.admin.client"),
    *("agent.sources.cluster", "agent.sources.manifest_source"),
    *("agent.operate.meshes", "agent.operate.doctor.checks"),
    *("agent.operate.cli.answers", "agent.operate.cli.explaining"),
    *(f"agent.operate.cli.commands.{name}" for name in _COMMANDS),
    *(f"agent.operate.cli.views.{name}" for name in _VIEWS),
    *("agent.operate.pinned.installation", "agent.operate.pinned.report"),
    *("agent.operate.pinned.status", "probes.protocols.tcp"),
)
"""What agents and commands import besides the command line."""

_MAX_REQUEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A process of a `ForkServer`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self._server = server
        # The server leaves it a zombie until `wait`, so the number cannot be another process's.
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        """Nothing happens if it was waited for."""
        if self._status is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._status_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal. Raises `subprocess.TimeoutExpired`."""
        status = self._status_within(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        return status

    def _status_within(self, seconds: float | None) -> int | None:
        if self._status is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(None if seconds is None else 1000 * seconds):
                self._status = self._server.status_of(self.pid)
                os.close(self._pidfd)
        return self._status


class ForkServer:
    """Starts `podgate` with arguments, in the caller's environment and directory."""

    def __init__(self) -> None:
        """The server inherits namespaces and cgroup: to be created where the agents are to run."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=pathlib.Path(__file__).parent.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def start(
        self, arguments: Sequence[str], log: IO[bytes], errors: IO[bytes] | None = None, /
    ) -> ForkedProcess:
        """Fork a process for `podgate ARGUMENTS`. log: its stdout, and its stderr if `errors` is
        None; stdin is empty."""
        request = {
            "arguments": arguments,
            "directory": os.getcwd(),
            "environment": dict(os.environ),
        }
        if node.current is not None:
            request["node"] = {"pid": os.getpid(), "cgroup": str(node.current.cgroup)}
        return ForkedProcess(self, self._request(request, [log.fileno(), (errors or log).fileno()]))

    def status_of(self, pid: int) -> int:
        """Wait for a process that has ended."""
        return self._request({"wait": pid})

    def close(self) -> None:
        """Kill what still runs."""
        self._control.close()
        self._process.wait()

    def _request(self, content: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(content).encode()], descriptors)
            return int(json.loads(self._control.recv(_MAX_REQUEST_BYTES)))


def _serve(control: socket.socket) -> None:
    """Serve until the worker closes its end; returns in each fork, which is to run `podgate`."""
    own = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 2)
        if not message:
            sys.exit()
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            control.close()
            return _become(request, descriptors, own)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], outputs: Sequence[int], server: int) -> None:
    """Set what a new process would have."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    if node_of_test := request.get("node"):
        pathlib.Path(node_of_test["cgroup"], "agents", "cgroup.procs").write_text(str(os.getpid()))
        try:
            node.join(node_of_test["pid"])
        except OSError:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
        os.close(output)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["podgate", *request["arguments"]]


def _run(main: Callable[..., object]) -> None:
    """Run `podgate`, and exit as the interpreter does: after threads, exit functions and output.

    But what the server has imported is not taken apart: the kernel would copy each of its pages,
    which takes four times as long as most commands.
    """
    try:
        main(prog_name="podgate")
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        except (OSError, ValueError):
            # The interpreter has a status of its own for this.
            raise error from None
        os._exit(error.code or 0)


if __name__ == "__main__":
    # Of a terminal, for the worker, which then ends what it started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from agent.app import pod_services
    from agent.operate.cli.main import main
    from bpf import btf, errors

    for module in (*_MODULES, *pod_services.OPTIONAL):
        importlib.import_module(module)
    # Where the kernel's types are is found once.
    with contextlib.suppress(errors.BpfError):
        btf.function_id("bpf_rdonly_cast")
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    _run(main)
