"""A relay process without an agent: the test sends its messages, and connects as the kubelet."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TypeVar

from agent.lab.lab import LabPod
from agent.relay import messages
from agent.relay.messages import Answer, RelayTargetSpec, SharedRequest, Sharing, Verdict
from agent.relay.targets import FIRST_HOST
from agent.settings import RelayRanges, parse_range4, parse_range6
from agent.strict import ranges as strict_ranges
from agent.strict import veth_pair
from bpf import sources
from bpf.pins import Pins
from bpf.redirect import Redirect
from probes.netns import Netns
from tests.polling import PATIENCE_SECONDS

_RANGES = RelayRanges(parse_range4("198.18.64.0/18"), parse_range6("fd00:18:64::/64"))
_ANY_PORT = ((1, 65535),)

M = TypeVar("M", bound=messages.FromRelay)


class RelayProcess:
    """A relay with a target for each address of one pod."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, pod: LabPod
    ) -> None:
        self.process = process
        self.pod = pod
        self._control = control
        self._frames = messages.Frames()
        self._received: list[messages.FromRelay] = []
        self._revision = 0
        self._answers: tuple[Answer, ...] = ()
        self._shared: tuple[SharedRequest, ...] = ()
        self._reports: list[messages.RelayReport] = []
        self._host = FIRST_HOST

    @property
    def ipv4(self) -> str:
        """The relay's address of the pod's IPv4 address."""
        return self._relay_address(0)

    @property
    def ipv6(self) -> str:
        return self._relay_address(1)

    def _relay_address(self, family: int) -> str:
        return str(strict_ranges.shares(_RANGES, 0)[family].subnet[self._host])

    def set_answers(self, *answers: Answer, shared: tuple[SharedRequest, ...] = ()) -> None:
        """Of both addresses. shared: requests to a port that the pod shares with others; those
        without a key are its own."""
        self._answers = answers
        self._shared = shared
        self._set_targets(
            *(self._spec(address, answers) for address in (self.pod.ipv4, self.pod.ipv6))
        )

    def remove_targets(self) -> None:
        """Later ones get the next addresses of the relay."""
        self._set_targets()
        self._host += 1

    def begin_to_engage(self) -> None:
        """It answers with `Engaged`."""
        self._send(messages.Engage())

    def release(self, drain_seconds: float) -> None:
        self._send(messages.Release(drain_seconds))

    def _set_targets(self, *targets: RelayTargetSpec) -> None:
        self._revision += 1
        self._send(messages.SetTargets(self._revision, targets))
        applied = self.wait_for(messages.TargetsApplied)
        assert not applied.rejected

    def set_verdict(
        self, answer: int, *, is_healthy: bool, ends_ns: int | None, reason: str = "a reason"
    ) -> None:
        """Of both addresses; applied when this returns, as messages are handled in order."""
        entries = (self.pod.ipv4, self.pod.ipv6)
        self._send(
            messages.SetVerdicts(
                tuple(Verdict(key, answer, is_healthy, reason, ends_ns) for key in entries)
            )
        )
        self.set_answers(*self._answers, shared=self._shared)

    def counts(self) -> dict[tuple[str, int], int]:
        """Of connections to ports with answers since the last call, by outcome and port, of both
        addresses together."""
        # A report may be on its way that was sent before the last connection.
        for _ in range(2):
            self.wait_for(messages.RelayReport)
        found: dict[tuple[str, int], int] = {}
        for sample in (sample for report in self._reports for sample in report.answers):
            name = (sample.outcome, sample.port)
            found[name] = found.get(name, 0) + sample.count
        self._reports.clear()
        return found

    def wait_for(self, kind: type[M]) -> M:
        """The next message of this kind. Reports are kept."""
        while True:
            for message in self._read():
                if isinstance(message, messages.RelayFailed | messages.RelayWarning):
                    raise AssertionError(message.message)
                if isinstance(message, kind):
                    return message

    def start(self, bpffs: Pins, cgroup: str) -> None:
        inside = veth_pair.INSIDE
        subnets = [str(share.subnet) for share in strict_ranges.shares(_RANGES, 0)]
        self._send(
            messages.Configure(
                str(bpffs.bpffs), sources.fingerprint(), cgroup, subnets[0], subnets[1], inside
            )
        )
        self.wait_for(messages.NetnsReady)
        self._send(messages.PairReady(asyncio.run(_connect(self.process.pid))))
        self.wait_for(messages.RelayReady)

    def _spec(self, address: str, answers: tuple[Answer, ...]) -> RelayTargetSpec:
        netns = self.pod.netns
        requests = tuple(
            SharedRequest(one.port, one.sent, one.key or address) for one in self._shared
        )
        ports = tuple({one.port for one in requests})
        return RelayTargetSpec(
            *(address, netns.path, netns.device, netns.inode, address),
            ports=_ANY_PORT,
            claims=(),
            answers=answers,
            sharing=Sharing(ports, requests) if requests else None,
        )

    def _send(self, message: messages.ToRelay) -> None:
        self._control.sendall(messages.pack(message))

    def _read(self) -> Iterator[messages.FromRelay]:
        if not self._received:
            data = self._control.recv(1 << 16)
            assert data, "the relay has exited"
            self._received += map(messages.decode_for_agent, self._frames.feed(data))
        while self._received:
            message = self._received.pop(0)
            if isinstance(message, messages.RelayReport):
                self._reports.append(message)
            yield message


async def _connect(pid: int) -> int:
    async def no_gate(ifindex: int) -> None:
        """The test is the only process of this node."""

    await veth_pair.add_range_routes(_RANGES)
    netns = Netns.open(f"/proc/{pid}/ns/net")
    return (await veth_pair.make(0, _RANGES, netns, gate=no_gate)).ifindex


@contextlib.contextmanager
def relay_process(bpffs: Pins, pod: LabPod, cgroup: str = "/") -> Iterator[RelayProcess]:
    """bpffs: of an installation whose programs are loaded; cgroup: the directory whose connects it
    redirects once it is engaged."""
    control, theirs = socket.socketpair()
    command = [sys.executable, "-m", "agent.relay", str(theirs.fileno())]
    with control, theirs:
        control.settimeout(PATIENCE_SECONDS)
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            made = RelayProcess(process, control, pod)
            made.start(bpffs, cgroup)
            made.set_answers()
            yield made
        finally:
            process.kill()
            process.wait()
            asyncio.run(veth_pair.remove_everything())
            with Redirect.open(bpffs, sources.fingerprint()) as redirect:
                redirect.delete_within([share.subnet for share in strict_ranges.shares(_RANGES, 0)])
