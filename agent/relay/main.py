"""The relay's process: one loop that holds, dials, carries and reports.

Its end is what the kubelet waits for when it is killed, and the kernel needs a millisecond for each
10 MB of a process's memory: so nothing is imported here that is not used, no logging, no asyncio.
What is to be logged, the agent is told.

It lives in a network namespace of its own, which ends with it, and so do the links by which the
kubelet's connects are redirected: whatever ends this process, the next connect goes direct.
"""

import contextlib
import gc
import ipaddress
import os
import pathlib
import resource
import signal
import socket
import time
from collections.abc import Callable

from agent.linux.netns import unshare_network
from agent.relay import messages
from agent.relay.control import Control
from agent.relay.epoll import Poller
from agent.relay.held_syns import HeldOpenings
from agent.relay.raw_sockets import Openings
from agent.relay.stats import Tally
from agent.relay.targets import NoAddressLeft, Target, Targets
from bpf import pins
from bpf.errors import BpfError, PinError
from bpf.redirect import Redirect

# The kernel takes a relay for hung after 300 ms.
_BEAT_SECONDS = 0.05
_REPORT_SECONDS = 1.0
_EXPIRE_SECONDS = 0.25
_LOOK_SECONDS = 10.0

# No byte in either direction for so long: a postStart hook may work for long before it answers.
_IDLE_SECONDS = 3600.0
# As long as the kernel keeps what was closed at one end (tcp_fin_timeout).
_HALF_CLOSED_SECONDS = 60.0

# Descriptors that are not for connections: listeners, maps, links, sockets of our own. Where there
# are few, a quarter of all.
_OTHER_DESCRIPTORS = 1200
# After the kernel said that there is no room, whatever was counted here.
_EXHAUSTED_SECONDS = 1.0
_ORPHAN_DRAIN_SECONDS = 10.0
# A connect that was redirected a moment before a release is still on its way.
_LINGER_SECONDS = 0.5
# A probe that waits behind a busy node's processes is one that fails; and so is the end of a relay
# that is killed, which has to run for that.
_NICENESS = -10


class Relay:
    """One relay, from its agent's first message to its end. `run` returns the exit status."""

    def __init__(self, control: socket.socket, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._poller = Poller()
        self._tally = Tally()
        self._control = Control(
            self._poller,
            control,
            on_message=self._on_message,
            on_end=lambda: self._release(_ORPHAN_DRAIN_SECONDS),
        )
        self._start: messages.Start | None = None
        self._pair_ifindex = 0
        self._redirect: Redirect | None = None
        self._targets: Targets | None = None
        self._held: HeldOpenings | None = None
        self._is_engaged = False
        self._exhausted_until = 0.0
        descriptors = _raise_descriptor_limit()
        self._most_connections = (descriptors - min(_OTHER_DESCRIPTORS, descriptors // 4)) // 2
        self._is_told_to_end = False
        self._lingers_until = 0.0
        self._ends_at: float | None = None
        self._last_activity: dict[object, float] = {}
        self._due = dict.fromkeys((self._beat, self._report, self._expire, self._look), 0.0)
        self._every = {
            self._beat: _BEAT_SECONDS,
            self._report: _REPORT_SECONDS,
            self._expire: _EXPIRE_SECONDS,
            self._look: _LOOK_SECONDS,
        }

    def run(self) -> int:
        """Until nothing is left to carry after a release."""
        # A terminal's or service manager's signal to the whole group must not cut what is carried.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._told_to_end)
        with contextlib.suppress(OSError):  # without CAP_SYS_NICE
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        # What stands stays, and connections are no cycles: a collection would only cost time.
        gc.collect()
        gc.freeze()
        try:
            while not self._is_over():
                self._poll_until(min(self._due.values()))
                self._do_what_is_due()
        except (BpfError, PinError, OSError, ValueError) as error:
            return self._fail(error)
        self._forget_targets()
        return 0

    def _poll_until(self, due: float) -> None:
        """Most rounds are one event: nothing else is looked at between them."""
        while (left := due - self._now()) > 0:
            self._poller.poll(left)

    def _told_to_end(self, _number: int, _frame: object) -> None:
        self._is_told_to_end = True

    def _is_over(self) -> bool:
        if self._is_told_to_end:
            self._release(_ORPHAN_DRAIN_SECONDS)
        if self._ends_at is None:
            return False
        if self._now() < self._lingers_until:
            return False
        is_empty = self._held is None or self._held.is_empty
        return is_empty or self._now() >= self._ends_at

    def _do_what_is_due(self) -> None:
        now = self._now()
        for what, due in self._due.items():
            if now >= due:
                self._due[what] = now + self._every[what]
                what()

    def _on_message(self, message: messages.ToRelay) -> None:
        match message:
            case messages.Start():
                self._begin(message)
            case messages.Paired():
                self._ready(message)
            case messages.Want():
                self._want(message)
            case messages.Engage():
                self._engage()
            case messages.Release():
                self._release(message.drain_seconds)

    def _begin(self, start: messages.Start) -> None:
        self._start = start
        self._redirect = Redirect.open(pins.Pins(start.bpffs))
        unshare_network()
        self._control.tell(messages.Unshared())

    def _ready(self, paired: messages.Paired) -> None:
        assert self._start is not None
        assert self._redirect is not None
        self._pair_ifindex = paired.ifindex
        inside = self._start.inside
        # Held first: from then on nothing opens but what is sent again.
        self._redirect.hold(socket.if_nametoindex(inside))
        subnets = [ipaddress.ip_network(net) for net in (self._start.subnet4, self._start.subnet6)]
        self._redirect.forget_within(subnets)
        self._targets = Targets(subnets, self._now)
        self._held = HeldOpenings(
            self._poller,
            self._targets,
            self._tally,
            most=self._most_connections,
            on_full=self._beat,
            on_exhausted=self._exhausted,
            on_trouble=lambda sentence: self._control.tell(messages.Trouble(sentence)),
            now=self._now,
        )
        Openings(inside, self._poller, on_opening=self._held.take, on_gone=self._pair_gone)
        self._control.tell(messages.Ready())

    def _pair_gone(self) -> None:
        """Nothing comes and goes any more. `podgate cleanup` takes it from a relay that drains."""
        if self._ends_at is None:
            self._control.tell(messages.Failed("its interface was taken away"))
            self._release(0.0)
        self._ends_at = self._lingers_until = self._now()

    def _want(self, want: messages.Want) -> None:
        """Make the targets what is wanted: those that go first, since others may have their
        addresses now."""
        assert self._targets is not None
        assert self._redirect is not None
        wanted = {target.key: target for target in want.targets}
        for target in self._targets:
            new = wanted.get(target.key)
            if new is None or not target.is_same_place(new):
                self._remove(target)
        refused = {}
        for new in want.targets:
            try:
                self._bring_up(new)
            except (NoAddressLeft, ValueError, BpfError) as error:
                refused[new.key] = str(error)
        self._redirect.keep_only(
            {(target.address, port) for target in self._targets for port in target.claims}
        )
        self._control.tell(messages.Have(want.revision, refused))

    def _bring_up(self, wanted: messages.WantedTarget) -> None:
        """Raises `NoAddressLeft`, `ValueError` or `BpfError`; then nothing is redirected to it."""
        assert self._targets is not None
        assert self._redirect is not None
        target = self._targets.get(wanted.key)
        before: frozenset[int] = frozenset()
        if target is None:
            target = self._targets.add(wanted)
        else:
            before = target.claims
        target.ports = wanted.ports
        target.claims = frozenset(wanted.claims)
        self._redirect.withdraw(target.relay, target.address, before - target.claims)
        try:
            self._redirect.publish(target.relay, target.address, target.claims, self._pair_ifindex)
        except BpfError:
            self._remove(target)
            raise

    def _remove(self, target: Target) -> None:
        assert self._targets is not None
        assert self._redirect is not None
        assert self._held is not None
        self._redirect.withdraw(target.relay, target.address, target.claims)
        self._redirect.forget(target.relay)
        self._targets.remove(target)
        self._held.abandon(target)

    def _engage(self) -> None:
        assert self._start is not None
        assert self._redirect is not None
        self._is_engaged = True
        self._beat()
        self._redirect.engage(pathlib.Path(self._start.cgroup))
        self._control.tell(messages.Engaged())

    def _release(self, drain_seconds: float) -> None:
        """Redirect no more: the links go first, since the maps may be a successor's by now."""
        if self._ends_at is not None:
            return
        self._is_engaged = False
        self._lingers_until = self._now() + _LINGER_SECONDS
        self._ends_at = self._now() + drain_seconds
        if self._redirect is None or self._targets is None:
            return
        self._redirect.disengage()
        for target in self._targets:
            self._redirect.withdraw(target.relay, target.address, target.claims)

    def _forget_targets(self) -> None:
        if self._redirect is not None:
            for target in self._targets or ():
                self._redirect.forget(target.relay)

    def _beat(self) -> None:
        """Say that connects are welcome; while there is no room for more, they are not."""
        if self._is_engaged and self._redirect is not None:
            if self._is_full():
                self._redirect.pause()
            else:
                self._redirect.beat()

    def _is_full(self) -> bool:
        if self._now() < self._exhausted_until:
            return True
        return self._held is not None and self._held.is_full

    def _exhausted(self) -> None:
        self._exhausted_until = self._now() + _EXHAUSTED_SECONDS
        self._beat()

    def _report(self) -> None:
        if self._held is not None and self._control.is_idle:
            self._control.tell(
                messages.Report(
                    len(self._held.connections),
                    self._held.count,
                    self._is_full(),
                    self._tally.take(),
                )
            )

    def _expire(self) -> None:
        if self._held is not None:
            self._held.expire()

    def _look(self) -> None:
        """End connections on which nothing has happened for too long."""
        if self._held is None:
            return
        now = self._now()
        last = self._last_activity
        self._last_activity = {}
        for connection in list(self._held.connections):
            seen = now if connection.active else last.get(connection, now)
            connection.active = False
            limit = _HALF_CLOSED_SECONDS if connection.is_half_closed else _IDLE_SECONDS
            if now - seen >= limit:
                connection.finish()
            else:
                self._last_activity[connection] = seen

    def _fail(self, error: Exception) -> int:
        """The links end with the process, so all goes direct from here on."""
        self._control.tell(messages.Failed(str(error)))
        return 1


def _raise_descriptor_limit() -> int:
    """As many as may be; two for each connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def end_of(descriptor: int) -> socket.socket:
    """The socket that the agent left us."""
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)
