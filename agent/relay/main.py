"""The relay process: one loop that holds SYNs, connects to pods, proxies and reports.

When the relay is killed, the kubelet waits for its exit, and the kernel needs a millisecond for
each 10 MB of the process's memory. So this process imports only what it uses: no logging, no
asyncio. The agent logs its warnings.

The process has its own network namespace, which is removed at its exit. So are the links that
redirect the kubelet's connects: however the process ends, the next connect goes direct. While they
last, it does not need its agent: `agent.relay.orphanhood`.
"""

import contextlib
import gc
import ipaddress
import math
import os
import pathlib
import resource
import signal
import socket
import time
from collections.abc import Callable, Collection

from agent.linux import malloc
from agent.linux.namespaces import unshare_network
from agent.relay import messages
from agent.relay.control import ControlChannel, ControlSocket
from agent.relay.epoll import EpollPoller
from agent.relay.held_syns import HeldSyns
from agent.relay.hooks import RelayHooks
from agent.relay.interfaces import WAY_HOST
from agent.relay.orphanhood import WATCH_SECONDS, HostNetns, Orphanhood, OwnWay
from agent.relay.outcomes import AnswerCounter, OutcomeCounter
from agent.relay.raw_sockets import SynCapture
from agent.relay.signals import Signals
from agent.relay.targets import AddressPoolExhaustedError, RelayTarget, Targets
from agent.relay.timers import EARLY_SECONDS, Timers
from bpf import pins
from bpf.abi import IPAddress
from bpf.errors import BpfError, PinError
from bpf.redirect import Redirect

# The kernel considers a relay hung after 300 ms without a heartbeat. One that has no connections
# beats less often, unless it had to wait for a CPU not long ago.
_BEAT_SECONDS, _RESTING_BEAT_SECONDS = 0.05, 0.125
_LATE_SECONDS, _LATE_MEMORY_SECONDS = 0.025, 10.0
_REPORT_SECONDS = 1.0
_EXPIRE_SECONDS = 0.25
_CHECK_SECONDS = 10.0

# The limit for a connection without data: a postStart hook may work for long before it responds.
_IDLE_SECONDS = 3600.0
# As long as the kernel keeps a half-closed connection (tcp_fin_timeout).
_HALF_CLOSED_SECONDS = 60.0

# Descriptors for listeners, maps, links and the relay's own sockets. With a low limit, a quarter of
# all descriptors.
_OTHER_DESCRIPTORS = 1200
# How long connects bypass the relay after the kernel has reported a lack of resources.
_EXHAUSTED_SECONDS = 1.0
# A connect that was redirected just before a release may still arrive.
_LINGER_SECONDS = 0.5
# A probe that waits for a CPU on a busy node fails. A killed relay needs a CPU to exit, too.
_NICENESS = -10


class Relay:
    """One relay, from the agent's first message to its exit. `run` returns the exit status."""

    def __init__(self, control: socket.socket, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._poller = EpollPoller()
        self._outcomes = OutcomeCounter()
        self._answered = AnswerCounter()
        self._control = ControlChannel(
            self._poller,
            control,
            on_message=self._on_message,
            on_closed=self._on_agent_gone,
        )
        self._orphanhood: Orphanhood | None = None
        self._host: HostNetns | None = None
        self._configuration: messages.Configure | None = None
        self._pair_ifindex = 0
        self._way: list[IPAddress] = []
        self._redirect: Redirect | None = None
        self._hooks: RelayHooks | None = None
        self._targets: Targets | None = None
        self._held_syns: HeldSyns | None = None
        self._is_engaged = False
        self._exhausted_until = 0.0
        descriptors = _raise_descriptor_limit()
        self._max_connections = (descriptors - min(_OTHER_DESCRIPTORS, descriptors // 4)) // 2
        self._lingers_until = 0.0
        self._ends_at: float | None = None
        self._last_activity: dict[object, float] = {}
        self._was_late_at = float("-inf")
        self._timers = Timers(
            {
                self._beat_again: _BEAT_SECONDS,
                self._report: _REPORT_SECONDS,
                self._expire: _EXPIRE_SECONDS,
                self._check: _CHECK_SECONDS,
                self._watch: WATCH_SECONDS,
            },
            now,
        )

    def run(self) -> int:
        """Until the last connection is closed after a release."""
        # A terminal or service manager signals the whole group; open connections must survive that.
        Signals(self._poller, (signal.SIGINT, signal.SIGTERM), self._stop)
        with contextlib.suppress(OSError):  # without CAP_SYS_NICE
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        # A list of all targets is a large block, which comes twice a minute.
        malloc.keep_little()
        # Objects from here on form no cycles: a collection would only cost time.
        gc.collect()
        gc.freeze()
        malloc.give_back()
        try:
            while not self._is_over():
                self._poll_until(self._timers.next_due())
                self._timers.run()
        except (PinError, OSError, ValueError) as error:
            return self._fail(error)
        self._forget_targets()
        return 0

    def _poll_until(self, due: float) -> None:
        """Most rounds handle one event: timers are not checked between them, unless they are due
        soon: then they need no wake-up of their own."""
        while (left := due - self._now()) > EARLY_SECONDS:
            self._poller.poll(left)

    def _stop(self) -> None:
        """Another relay serves: it has the maps, so these links would lead to it alone, even after
        it was killed."""
        self._release(messages.DRAIN_SECONDS)

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        if self._now() < self._lingers_until:
            return False
        is_empty = self._held_syns is None or self._held_syns.is_empty
        return is_empty or self._now() >= self._ends_at

    def _on_message(self, message: messages.ToRelay) -> None:
        match message:
            case messages.Configure():
                self._configure(message)
            case messages.PairReady():
                self._use_pair(message)
            case messages.SetTargets():
                self._set_targets(message)
            case messages.ChangeTargets():
                self._change_targets(message)
            case messages.SetVerdicts():
                self._set_verdicts(message)
            case messages.Engage():
                self._engage()
            case messages.Release():
                self._release(message.drain_seconds)

    def _configure(self, configuration: messages.Configure) -> None:
        self._configuration = configuration
        self._redirect = Redirect.open(pins.Pins(configuration.bpffs), configuration.programs)
        if configuration.tries_way:
            self._host = HostNetns()
        unshare_network()
        # After that: a thread stays in the namespace in which it is started.
        self._hooks = RelayHooks(self._poller, self._redirect)
        self._control.send(messages.NetnsReady())

    def _use_pair(self, pair: messages.PairReady) -> None:
        assert self._configuration is not None
        assert self._redirect is not None
        self._pair_ifindex = pair.ifindex
        configuration = self._configuration
        # First of all: from here on only injected SYNs open connections.
        self._redirect.attach_hold(socket.if_nametoindex(configuration.inside))
        subnets = [
            ipaddress.ip_network(net) for net in (configuration.subnet4, configuration.subnet6)
        ]
        self._redirect.delete_within(subnets)
        self._way = [subnet[WAY_HOST] for subnet in subnets]
        self._targets = Targets(subnets, self._now)
        self._held_syns = HeldSyns(
            self._poller,
            self._targets,
            self._outcomes,
            self._answered,
            way={address.packed for address in self._way},
            maximum=self._max_connections,
            on_full=self._beat,
            on_exhausted=self._exhausted,
            on_warning=lambda sentence: self._control.send(messages.RelayWarning(sentence)),
            now=self._now,
        )
        SynCapture(
            configuration.inside,
            self._poller,
            on_syn=self._held_syns.hold,
            on_removed=self._on_pair_removed,
        )
        self._control.send(messages.RelayReady())

    def _on_pair_removed(self) -> None:
        """No packet passes any more. `podgate cleanup` removes the pair of a draining relay."""
        if self._ends_at is None:
            self._control.send(messages.RelayFailed("its interface was removed"))
            self._release(0.0)
        self._ends_at = self._lingers_until = self._now()

    def _set_targets(self, message: messages.SetTargets) -> None:
        """Apply the desired targets, whatever was there before."""
        assert self._targets is not None
        assert self._redirect is not None
        desired = {spec.key for spec in message.targets}
        removed = [target.key for target in self._targets if target.key not in desired]
        rejected = self._apply(message.targets, removed)
        self._redirect.keep_only(
            {(target.address, port) for target in self._targets for port in target.claims}
        )
        self._control.send(messages.TargetsApplied(message.revision, rejected))

    def _change_targets(self, message: messages.ChangeTargets) -> None:
        rejected = self._apply(message.changed, message.removed)
        self._control.send(messages.TargetsApplied(message.revision, rejected))

    def _apply(
        self, changed: Collection[messages.RelayTargetSpec], removed: Collection[str]
    ) -> dict[str, str]:
        """Removals come first: a new target may have the address of an old one. Returns the
        sentence for each rejected one, by key."""
        assert self._targets is not None
        gone = [self._targets.get(key) for key in removed]
        for spec in changed:
            target = self._targets.get(spec.key)
            if target is not None and not target.has_same_netns(spec):
                gone.append(target)
        for target in gone:
            if target is not None:
                self._remove(target)
        rejected = {}
        for spec in changed:
            try:
                self._add_or_update(spec)
            except (AddressPoolExhaustedError, ValueError, BpfError) as error:
                rejected[spec.key] = str(error)
        return rejected

    def _add_or_update(self, spec: messages.RelayTargetSpec) -> None:
        """Raises `AddressPoolExhaustedError`, `ValueError` or `BpfError`; then no connect is
        redirected to the target."""
        assert self._targets is not None
        assert self._redirect is not None
        target = self._targets.get(spec.key)
        previous_claims: frozenset[int] = frozenset()
        if target is None:
            target = self._targets.add(spec)
        else:
            previous_claims = target.claims
        target.ports = spec.ports
        target.user = spec.user
        target.claims = frozenset(spec.claims)
        target.answers.set_answers(spec.answers)
        target.set_sharing(spec.sharing)
        self._redirect.withdraw(target.relay, target.address, previous_claims - target.claims)
        try:
            self._redirect.publish(
                target.relay,
                target.address,
                target.claims,
                self._pair_ifindex,
                admits_translated=spec.admits_translated,
            )
        except BpfError:
            self._remove(target)
            raise

    def _set_verdicts(self, message: messages.SetVerdicts) -> None:
        assert self._targets is not None
        for verdict in message.entries:
            # Its target may have been removed before.
            if target := self._targets.get(verdict.target_key):
                target.answers.set_verdict(verdict)

    def _remove(self, target: RelayTarget) -> None:
        assert self._targets is not None
        assert self._redirect is not None
        assert self._held_syns is not None
        self._redirect.withdraw(target.relay, target.address, target.claims)
        self._redirect.delete(target.relay)
        self._targets.remove(target)
        self._held_syns.abandon(target)

    def _engage(self) -> None:
        assert self._configuration is not None
        assert self._hooks is not None
        self._is_engaged = True
        self._beat()
        cgroup = pathlib.Path(self._configuration.cgroup)
        self._hooks.engage(cgroup, lambda: self._control.send(messages.Engaged()))

    def _on_agent_gone(self) -> None:
        """Continue without an agent, if this relay serves."""
        if self._configuration is None or self._hooks is None or not self._is_engaged:
            self._release(messages.DRAIN_SECONDS)
            return
        way = OwnWay(self._host.netns, self._way) if self._host else None
        seconds = self._configuration.orphan_seconds
        self._orphanhood = Orphanhood(seconds, way, self._hooks, now=self._now)
        self._watch()

    def _watch(self) -> None:
        """Without an agent nothing else removes a target: another sandbox may get the address of
        one that is gone, and the gate admits the kubelet to that one."""
        if self._orphanhood is None or self._targets is None:
            return
        for target in self._targets:
            if not target.netns.exists():
                self._remove(target)
        if self._orphanhood.is_over():
            self._release(messages.DRAIN_SECONDS)

    def _release(self, drain_seconds: float) -> None:
        """Stop redirecting, and serve until nothing is redirected here any more."""
        if self._ends_at is not None:
            return
        if self._orphanhood is not None:
            self._orphanhood.close()
            self._orphanhood = None
        self._is_engaged = False
        self._ends_at = self._now() + drain_seconds
        if self._hooks is not None:
            self._lingers_until = math.inf
            self._hooks.disengage(self._disengaged)

    def _disengaged(self) -> None:
        """The hooks went first: the maps may already belong to the next relay."""
        self._lingers_until = self._now() + _LINGER_SECONDS
        if self._redirect is None:
            return
        for target in self._targets or ():
            self._redirect.withdraw(target.relay, target.address, target.claims)

    def _forget_targets(self) -> None:
        if self._redirect is not None:
            for target in self._targets or ():
                self._redirect.delete(target.relay)

    def _beat_again(self) -> None:
        self._beat()
        now = self._now()
        if self._timers.late_seconds > _LATE_SECONDS:
            self._was_late_at = now
        has_connections = self._held_syns is not None and not self._held_syns.is_empty
        is_resting = not has_connections and now >= self._was_late_at + _LATE_MEMORY_SECONDS
        seconds = _RESTING_BEAT_SECONDS if is_resting else _BEAT_SECONDS
        self._timers.set_period(self._beat_again, seconds)

    def _beat(self) -> None:
        """Write the heartbeat that redirects connects here; pause it while the relay is full."""
        if self._is_engaged and self._redirect is not None:
            if self._is_full():
                self._redirect.pause()
            else:
                self._redirect.beat()

    def _is_full(self) -> bool:
        if self._now() < self._exhausted_until:
            return True
        return self._held_syns is not None and self._held_syns.is_full

    def _exhausted(self) -> None:
        self._exhausted_until = self._now() + _EXHAUSTED_SECONDS
        self._beat()

    def _report(self) -> None:
        if self._held_syns is not None and self._control.is_idle:
            self._control.send(
                messages.RelayReport(
                    self._held_syns.open_count,
                    self._held_syns.count,
                    self._is_full(),
                    self._outcomes.drain(),
                    self._answered.drain(),
                )
            )

    def _expire(self) -> None:
        if self._held_syns is not None:
            self._held_syns.expire()

    def _check(self) -> None:
        """Close connections that were inactive for too long."""
        if self._held_syns is None:
            return
        now = self._now()
        last = self._last_activity
        self._last_activity = {}
        for connection in list(self._held_syns.connections):
            seen = now if connection.is_active else last.get(connection, now)
            connection.is_active = False
            limit = _HALF_CLOSED_SECONDS if connection.is_half_closed else _IDLE_SECONDS
            if now - seen >= limit:
                connection.finish()
            else:
                self._last_activity[connection] = seen

    def _fail(self, error: Exception) -> int:
        """Report the error. The links end with the process, so connects go direct from here on."""
        self._control.send(messages.RelayFailed(str(error)))
        return 1


def _raise_descriptor_limit() -> int:
    """Raise the limit to its maximum, since each connection needs two; return it."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    return maximum


def open_control_socket(descriptor: int) -> socket.socket:
    """The socket that the relay inherits from the agent."""
    os.set_inheritable(descriptor, False)
    return ControlSocket(fileno=descriptor)
