"""The act in which things fail: a pod, the relay, and the agent for longer than 15 seconds."""

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from concurrent import futures

from agent import labels
from agent.admin.report import AgentReport
from agent.gates.heartbeat import STALE_AFTER_SECONDS
from agent.lab import agent_process, attempts, polling
from agent.lab import lab as labs
from agent.lab.attempts import FAMILIES
from agent.lab.exits import has_ended
from agent.lab.lab import BPFFS
from agent.logs import Event
from agent.operate.demo import events
from agent.operate.demo.events import Danger, Fact, Subject
from agent.operate.demo.host_acts import CONNECTS, HostActs
from agent.operate.demo.kubelet_acts import UNDECLARED_PORT, KubeletActs
from agent.operate.demo.node import DemoNode
from agent.operate.demo.pods import FAILURE_FILE, has_status
from agent.pods.conditions import FALSE, TRUE
from bpf import loader, pins
from bpf.node_config import NodeConfig

_POD_RECOVERS = Fact("pod recovers")
_RELAY_KILLED = Fact("closed without relay", Danger.CLOSED, Subject.HOST)
_AGENT_KILLED = Fact("without agent", Danger.CLOSED, Subject.HOST)
_STALE = Fact(f"after {STALE_AFTER_SECONDS:g} s", Danger.CLOSED, Subject.HOST)

_KILLED = Fact("killed", Danger.OPEN)


class FailureAct:
    """Kills the relay and the agent of pods in strict."""

    def __init__(
        self,
        node: DemoNode,
        hosts: HostActs,
        kubelet: KubeletActs,
        *,
        has_relay: bool,
        wait_for_strict: Callable[[], AgentReport],
    ) -> None:
        """has_relay: whether this kernel offers strict."""
        self._node = node
        self._has_relay = has_relay
        self._hosts = hosts
        self._kubelet = kubelet
        self._wait_for_strict = wait_for_strict

    def play(self) -> None:
        killed = ", and the relay is killed with SIGKILL" if self._has_relay else ""
        events.emit(events.Step(f"pod becomes unready{killed}"))
        # The pod's probes are the agent's: they do not depend on the relay.
        with futures.ThreadPoolExecutor() as pool:
            failing = pool.submit(self._fail_probe)
            if self._has_relay:
                self._relay_killed()
        for name, expected, observed in failing.result():
            events.check(name, expected, observed, fact=_POD_RECOVERS)
        self._agent_killed()

    def _fail_probe(self) -> list[tuple[str, str, str]]:
        """Let the pod `shop` fail and recover: checks with the expected and observed status."""
        checks = []
        for word, act, status in (
            ("unready", FAILURE_FILE.touch, FALSE),
            ("ready", FAILURE_FILE.unlink, TRUE),
        ):
            started = time.time()
            act()
            shop = self._node.pods.shop
            report = self._node.agent.wait_for(
                f"probes-passing {status}",
                functools.partial(has_status, pod=shop, status=status),
            )
            condition = agent_process.condition_of(report, shop.name, labels.PROBES_PASSING)
            assert condition is not None
            seconds = condition.last_transition_time.timestamp() - started
            self._node.timings[f"pod_{word}"] = round(seconds * 1000, 1)
            checks.append((f"pod becomes {word}: probes-passing", status, condition.status))
        return checks

    def _relay_killed(self) -> None:
        before = self._relay_pids()
        os.kill(before[-1], signal.SIGKILL)
        polling.wait_until("exit of the relay", lambda: has_ended(before[-1]))
        expected = f"success: {labs.NODE_IPV4}"
        observed = self._kubelet.probe("http", "IPv4")
        events.check("kubelet: next probe, relay killed", expected, observed)
        observed = self._node.connect(self._node.pods.web, "IPv4", is_rejected=True)
        name = "host to pod, relay killed"
        events.check(name, self._node.drop_result, observed, fact=_RELAY_KILLED)
        polling.wait_until("start of another relay", lambda: len(self._relay_pids()) > len(before))
        self._wait_for_strict()
        expected = f"success: {self._node.pods.web.ipv4}"
        observed = self._kubelet.probe("http", "IPv4")
        events.check("kubelet: probe by the new relay", expected, observed)

    def _agent_killed(self) -> None:
        events.emit(events.Step("killing the agent with SIGKILL"))
        follows = not self._node.report().kubelet_unfollowed
        self._node.agent.stop(signal.SIGKILL)
        self._node.draw(_KILLED)
        self._hosts_are_dropped("agent killed", _AGENT_KILLED)
        pods = self._node.pods
        observed = self._hosts.connect_pods(pods.rpc, pods.web, "IPv4")
        events.check("pod to pod, agent killed", CONNECTS, observed)
        # The relay continues without the agent.
        peer = pods.web.ipv4 if self._has_relay else labs.NODE_IPV4
        observed = self._kubelet.probe("http", "IPv4")
        events.check("kubelet: http probe, agent killed", f"success: {peer}", observed)
        self._heartbeat_is_stale(follows=follows)
        self._node.show("status")

    def _heartbeat_is_stale(self, *, follows: bool) -> None:
        """follows: whether the kernel follows the kubelet's restarts by itself."""
        seconds = STALE_AFTER_SECONDS + 1
        events.emit(events.Step(f"dating its last heartbeat {seconds:g} s back instead of waiting"))
        loaded = asyncio.run(loader.load(pins.Pins(BPFFS)))
        try:
            config = NodeConfig(loaded, now_ns=lambda: time.monotonic_ns() - int(seconds * 1e9))
            config.beat()
            if follows:
                self._hosts_are_dropped("heartbeat stale", _STALE)
            events.emit(events.Step("the same as if the kernel did not follow the kubelet"))
            unit = config.read().kubelet_unit
            config.set_kubelet_unit(0)
            cart = self._node.pods.cart
            observed = self._node.connect(cart, "IPv4", is_rejected=False)
            name = "host to declared port, stale, kubelet not followed"
            events.check(name, CONNECTS, observed)
            observed = attempts.connect_from_node(cart, "IPv4", UNDECLARED_PORT, is_rejected=True)
            name = "host to undeclared port, stale, kubelet not followed"
            events.check(name, self._node.drop_result, observed)
            config.set_kubelet_unit(unit)
        finally:
            loaded.close()

    def _hosts_are_dropped(self, when: str, fact: Fact) -> None:
        for family in FAMILIES:
            observed = self._node.connect(self._node.pods.web, family, is_rejected=True)
            events.check(
                f"host to pod, {when}, {family}", self._node.drop_result, observed, fact=fact
            )

    def _relay_pids(self) -> list[int]:
        """Of all relays, in the order of their start."""
        return [line["pid"] for line in self._node.agent.log_lines(Event.RELAY_STARTED)]
