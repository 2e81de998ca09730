"""Answers the system calls of agents: `python -m tests.faults.injector FD`.

It has a process of its own, since each answer is waited for. Commands come over a socket, with the
descriptors of agents' filters; each is answered when it is in force.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.faults import seccomp, system_calls

_MAX_BYTES = 1 << 16
_PATH_BYTES = 256
_CLONE_THREAD = 0x10000  # linux/sched.h
_DIRECTORY_CALLS = ("openat", "openat2", "newfstatat", "statx", "mkdirat", "unlinkat", "renameat")
_PATH_CALLS = ("open", "rename", "mkdir", "rmdir", "unlink", "readlink", "execve")
_FILE_CALLS = ("read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "getdents64")
_SOCKET_CALLS = ("sendto", "recvfrom", "sendmsg", "recvmsg", "connect", "accept", "accept4")
# What C libraries abort without: wake-ups of threads, and the clocks' and locale's files.
_NEVER_FAILING = ("anon_inode:", "pipe:", "socket:", "/dev/", "/etc/localtime")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Which calls fail, or wait.

    error: its number; 0: the call succeeds, after it has waited for `seconds`; every: one of N
    matching calls; below: the path of what fails begins with it; family: of the socket, a name of
    `socket.AddressFamily` without AF_; process: "agent", "others" (relay, nft), or "all"; commands:
    of bpf(2), protocols: of sockets of the family, all if there are none.
    """

    calls: tuple[str, ...]
    error: int
    every: int = 1
    below: str = ""
    family: str = ""
    process: str = "all"
    seconds: float = 0.0
    commands: tuple[int, ...] = ()
    protocols: tuple[int, ...] = ()

    def in_directory(self, run_directory: pathlib.Path) -> "Rule":
        """The same with the agent's run directory in place of "{run}"."""
        below = self.below.replace("{run}", str(run_directory))
        return dataclasses.replace(self, below=below)


class Injector:
    """The process, as a test sees it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.injector", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, agent: int, listener: int) -> None:
        """Answer the calls of this agent (its process id), too. Closes the descriptor."""
        self._request({"do": "answer", "agent": agent}, listener)
        os.close(listener)

    @contextlib.contextmanager
    def failing(self, rule: Rule) -> Iterator[None]:
        """Calls fail while the block runs."""
        self._request({"do": "begin", "rule": dataclasses.asdict(rule)})
        try:
            yield
        finally:
            self._request({"do": "end"})

    def failed(self) -> dict[str, int]:
        """How many calls failed or waited since the previous such call, by name."""
        found: dict[str, int] = self._request({"do": "count"})
        return found

    def answered(self) -> dict[str, int]:
        """All calls since the start, failed or not, by name."""
        found: dict[str, int] = self._request({"do": "total"})
        return found

    def close(self) -> None:
        """To be called when no agent runs: the calls of one would fail with ENOSYS from then on."""
        self._control.close()
        self._process.wait(timeout=60)

    def _request(self, command: dict[str, Any], *descriptors: int) -> Any:
        socket.send_fds(self._control, [json.dumps(command).encode()], descriptors)
        return json.loads(self._control.recv(_MAX_BYTES))


class _Answering:
    """The injector's own side."""

    def __init__(self) -> None:
        self.total = collections.Counter[str]()
        self.failed = collections.Counter[str]()
        self._agents: dict[int, int] = {}
        """Processes of agents, by listener."""
        self._rule: Rule | None = None
        self._numbers: frozenset[int] = frozenset()
        self._matching = 0
        self._waiting: list[tuple[float, int, seccomp.Call]] = []
        """Calls that are to wait: until when, and of which listener."""

    def add(self, listener: int, agent: int) -> None:
        self._agents[listener] = agent
        seccomp.wake_at_once(listener)

    def remove(self, listener: int) -> None:
        del self._agents[listener]
        self._waiting = [one for one in self._waiting if one[1] != listener]
        os.close(listener)

    def set_rule(self, rule: Rule | None) -> None:
        self._rule = rule
        names = rule.calls if rule else ()
        self._numbers = frozenset(
            system_calls.NUMBERS[name] for name in names if name in system_calls.NUMBERS
        )
        self._matching = 0

    def handle(self, listener: int) -> None:
        """Answer the call that waits."""
        call = seccomp.receive(listener)
        if call is None:
            return
        self.total[system_calls.NAMES[call.number]] += 1
        error = None
        rule = self._rule
        if call.number in self._numbers and rule and self._is_hit(call, rule, listener):
            if rule.seconds:
                self._waiting.append((time.monotonic() + rule.seconds, listener, call))
                return
            error = rule.error
        seccomp.answer(listener, call, error)

    def seconds_until_next(self) -> float | None:
        """Until a call has waited long enough; None without one."""
        first = min((until for until, _, _ in self._waiting), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def end_waits(self) -> None:
        """Answer the calls that have waited long enough."""
        now = time.monotonic()
        ended = [one for one in self._waiting if one[0] <= now]
        self._waiting = [one for one in self._waiting if one[0] > now]
        for _, listener, call in ended:
            seccomp.answer(listener, call, None)

    def _is_hit(self, call: seccomp.Call, rule: Rule, listener: int) -> bool:
        name = system_calls.NAMES[call.number]
        try:
            if not _matches(call, name, rule, self._agents[listener]):
                return False
        except OSError:  # it has ended, or its memory is not readable
            return False
        self._matching += 1
        if self._matching % rule.every:
            return False
        self.failed[name] += 1
        return True


def _matches(call: seccomp.Call, name: str, rule: Rule, agent: int) -> bool:
    """Raises `OSError`."""
    if rule.process != "all" and (_process_of(call.thread) == agent) != (rule.process == "agent"):
        return False
    if name in _SOCKET_CALLS:
        return not rule.family or _is_of_family(call, rule)
    if name == "bpf" and rule.commands:
        return call.arguments[0] in rule.commands
    if name in ("clone", "clone3") and _makes_thread(call, name):
        # gRPC's C core never works again in a process that once could not start one.
        return False
    if name == "setns":
        # Not back to the host's, which is ours: without that the process must end.
        target = os.stat(f"/proc/{call.thread}/fd/{_signed(call.arguments[0])}")
        return target.st_ino != os.stat("/proc/self/ns/net").st_ino
    path = _path(call, name)
    if path is None:
        return not rule.below
    return not path.startswith(_NEVER_FAILING) and path.startswith(rule.below)


def _makes_thread(call: seccomp.Call, name: str) -> bool:
    """Raises `OSError`."""
    flags = call.arguments[0]
    if name == "clone3":  # a struct clone_args, which begins with them
        with open(f"/proc/{call.thread}/mem", "rb", buffering=0) as memory:
            memory.seek(flags)
            (flags,) = struct.unpack("=Q", memory.read(8))
    return bool(flags & _CLONE_THREAD)


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status", "rb") as status:
        for line in status:
            if line.startswith(b"Tgid:"):
                return int(line.split()[1])
    return 0


def _path(call: seccomp.Call, name: str) -> str | None:
    """What the call is about; None for a call that has no path."""
    if name in _FILE_CALLS:
        return os.readlink(f"/proc/{call.thread}/fd/{_signed(call.arguments[0])}")
    if name in _PATH_CALLS:
        return _resolved(call, -1, call.arguments[0])
    if name in _DIRECTORY_CALLS or name in ("readlinkat", "renameat2"):
        return _resolved(call, _signed(call.arguments[0]), call.arguments[1])
    if name == "inotify_add_watch":
        return _resolved(call, -1, call.arguments[1])
    return None


def _resolved(call: seccomp.Call, directory: int, address: int) -> str:
    """A path as the call has it, made absolute."""
    with open(f"/proc/{call.thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        text = memory.read(_PATH_BYTES).split(b"\0", 1)[0].decode(errors="replace")
    if text.startswith("/"):
        return text
    base = "cwd" if directory < 0 else f"fd/{directory}"
    return os.path.join(os.readlink(f"/proc/{call.thread}/{base}"), text)


def _signed(value: int) -> int:
    """An int of C, as a register has it."""
    return int(struct.unpack("=i", struct.pack("=I", value & 0xFFFFFFFF))[0])


def _is_of_family(call: seccomp.Call, rule: Rule) -> bool:
    """Whether the call's socket has the rule's family and protocol. Raises `OSError`."""
    copy = seccomp.copy_descriptor(_process_of(call.thread), _signed(call.arguments[0]))
    with socket.socket(fileno=copy) as found:
        family = socket.AddressFamily(found.family).name.removeprefix("AF_")
        return family == rule.family and (not rule.protocols or found.proto in rule.protocols)


def _as_tuple(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(value) if isinstance(value, list) else value


def _obey(answering: _Answering, command: dict[str, Any], descriptors: list[int]) -> Any:
    match command["do"]:
        case "answer":
            answering.add(descriptors[0], command["agent"])
            return descriptors[0]
        case "begin":
            rule = command["rule"]
            answering.set_rule(Rule(**{name: _as_tuple(value) for name, value in rule.items()}))
        case "end":
            answering.set_rule(None)
        case "count":
            failed, answering.failed = answering.failed, collections.Counter()
            return failed
        case "total":
            return answering.total
    return None


def _serve(control: socket.socket) -> None:
    """Until the test closes its end, and no filter is left."""
    answering = _Answering()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        seconds = answering.seconds_until_next()
        ready = poll.poll(None if seconds is None else math.ceil(1000 * seconds))
        answering.end_waits()
        for descriptor, events in ready:
            if descriptor != control.fileno():
                if events & select.POLLIN:
                    answering.handle(descriptor)
                else:  # its last process has ended
                    poll.unregister(descriptor)
                    answering.remove(descriptor)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_BYTES, 1)
            if not message:
                return
            command = json.loads(message)
            result = _obey(answering, command, descriptors)
            if command["do"] == "answer":
                poll.register(result, select.POLLIN)
            control.send(json.dumps(result).encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
