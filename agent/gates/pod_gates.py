"""Guarding one pod: its namespace, its gates, and what to say about its isolation."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from agent.gates import pending_flows
from agent.gates.address_claims import AddressAuthority
from agent.gates.chain_order import ChainOrder
from agent.gates.worker import GateWorker
from agent.linux.pod_network import NetworkReader, PodNetwork
from agent.metrics import Metrics
from agent.pods.conditions import FALSE, TRUE
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission, GracePeriod, IsolationStatus, PodState
from bpf.errors import AttachError
from bpf.gates import GateConfig
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsError, NetnsGoneError

log = structlog.get_logger(__name__)

ENFORCED = "Enforced"
"""The reason for gates that stand; the relay makes it "Strict"."""

# What a pod asked before its gate remembered is answered within this time or asked again:
# resolv.conf's default timeout is 5 s.
_GRACE_NS = 5_000_000_000

# podgate-cni comes to its end within 20 s, and says nothing to the agent.
_PLUGIN_SECONDS = 25.0

_REASONS = {Mode.AUDIT: "Audit", Mode.ENFORCE: ENFORCED, Mode.STRICT: ENFORCED}


class PodGates:
    """Brings pods' gates into the wanted state. Not concurrent: one pod after the other."""

    def __init__(
        self,
        gate_worker: GateWorker,
        reader: NetworkReader,
        metrics: Metrics,
        owner_of: Callable[[Netns, Pod], Pod | None],
        admit: Callable[[Pod], Awaitable[Admission]],
        places: ChainOrder,
        authority: AddressAuthority,
        on_first_gate: Callable[[Pod], None],
        on_gate_lost: Callable[[Pod, str], None],
        on_unconfirmed_address: Callable[[Pod, str], None],
    ) -> None:
        """owner_of: another pod that already uses this namespace, if there is one; admit: what the
        pod's gates let in; on_first_gate: told of a sandbox that nobody had gated before;
        on_gate_lost: told why a gate that stood does not, in one sentence; on_unconfirmed_address:
        which addresses a pod claims that are not its own."""
        self._gate_worker = gate_worker
        self._reader = reader
        self._metrics = metrics
        self._owner_of = owner_of
        self._admit = admit
        self._places = places
        self._authority = authority
        self._on_first_gate = on_first_gate
        self._on_gate_lost = on_gate_lost
        self._on_unconfirmed_address = on_unconfirmed_address

    async def bring_up(self, guarded: PodState) -> IsolationStatus:
        """One pass over one pod; safe to repeat at any time."""
        pod = guarded.pod
        if pod.host_network:
            return IsolationStatus(
                TRUE, "HostNetwork", "The pod shares the node's network; it is part of the node."
            )
        if pod.netns_path is None:
            problem = pod.manifest_problem
            return IsolationStatus(
                FALSE,
                problem.reason if problem else "NetnsMissing",
                problem.message if problem else "The pod names no network namespace.",
            )
        try:
            netns = Netns.open(pod.netns_path)
        except NetnsGoneError as error:
            return IsolationStatus(FALSE, "NetnsNotFound", str(error))
        except NetnsError as error:
            return IsolationStatus(FALSE, "NetnsRefused", str(error))
        if other := self._owner_of(netns, pod):
            return IsolationStatus(
                FALSE,
                "NetnsInUse",
                f"{netns.path} is already the network namespace of pod {other.full_name}; "
                "give each pod its own.",
            )
        return await self._isolate(guarded, netns)

    async def remember(self, guarded: PodState) -> list[GracePeriod]:
        """Have the pod's gates remember what it asks; after `bring_up` of all that are marked,
        since closing comes first. Raises `AttachError`.

        Gates that only begin to are told what the pod asked before. Where that cannot be told for
        sure their grace goes on for a while: an answer too many is better than one too few.
        """
        new = [ifindex for ifindex in guarded.gates if await self._gate_worker.remember(ifindex)]
        if not new or guarded.netns is None or guarded.network is None:
            return []
        try:
            asked = await asyncio.to_thread(pending_flows.read, guarded.netns, guarded.network)
        except (NetnsGoneError, OSError) as error:
            asked = pending_flows.PendingFlows((), str(error))
        graces = []
        for ifindex in new:
            have_all_room = await self._gate_worker.recall(ifindex, asked.questions)
            unknown = asked.unknown or ("" if have_all_room else "some questions found no place")
            graces.append(
                GracePeriod(
                    guarded.pod.full_name,
                    guarded.gates[ifindex],
                    len(asked.questions),
                    unknown,
                    time.monotonic_ns() + _GRACE_NS if unknown else 0,
                )
            )
        return graces

    async def end(self, grace: GracePeriod) -> None:
        """Have it end in time; later than `remember`, because it takes long and harms nobody.

        Raises `BpfError`.
        """
        await self._gate_worker.end_grace(grace.interface.ifindex, grace.ends_at_ns)
        log.info(
            "gate gives grace for 5 s"
            if grace.incomplete_reason
            else "gate knows what the pod asked",
            pod=grace.pod,
            interface=grace.interface.name,
            questions=grace.flow_count,
            because=grace.incomplete_reason,
        )

    async def release(self, guarded: PodState) -> None:
        """Take the pod's gates away."""
        for ifindex in list(guarded.gates):
            await self._remove(guarded, ifindex)

    async def _isolate(self, guarded: PodState, netns: Netns) -> IsolationStatus:
        try:
            network = await self._reader.read(netns)
        except NetnsGoneError as error:
            return IsolationStatus(FALSE, "NetnsNotFound", str(error))
        guarded.netns = netns
        guarded.network = network
        pod = guarded.pod
        guarded.claims = await self._authority.check(pod, netns, network)
        self._report_claims(guarded)
        if pod.mode is Mode.OFF:
            await self._open(guarded, network)
            guarded.gated_netns = netns
            return IsolationStatus(
                TRUE, "Off", "The pod's mode is off: its interfaces are not gated."
            )

        await self._forget_vanished(guarded)
        try:
            await self._install(guarded)
        except (AttachError, ValueError) as error:
            if guarded.gated_netns != netns:
                return IsolationStatus(FALSE, "GateFailed", f"{error}.")
            self._metrics.gates_lost.inc()
            log.error("gate lost; it will be tried again", pod=pod.full_name, error=str(error))
            self._on_gate_lost(pod, f"The gate is lost and will be put back: {error}.")
        if network.not_gatable:
            guarded.gated_netns = netns
            return IsolationStatus(TRUE, "NotSupported", "; ".join(network.not_gatable) + ".")
        if not network.interfaces:
            return IsolationStatus(
                FALSE, "NoInterface", f"{netns.path} has no veth to this node yet; waiting for one."
            )
        guarded.gated_netns = netns
        return IsolationStatus(TRUE, _REASONS[pod.mode], _describe(guarded, network))

    def _report_claims(self, guarded: PodState) -> None:
        problem = guarded.claims.problem
        if self._authority.is_news(guarded.pod.uid, problem):
            log.warning("pod claims addresses", pod=guarded.pod.full_name, problem=problem)
            self._on_unconfirmed_address(guarded.pod, problem)

    async def _install(self, guarded: PodState) -> None:
        network = guarded.network
        assert network is not None
        guarded.admission = await self._admit(guarded.pod)
        config = GateConfig(
            guarded.pod.mode,
            guarded.claims.confirmed,
            guarded.admission.rules,
            claimed=tuple(a for a in network.addresses if a not in guarded.claims.confirmed),
        )
        guarded.chain_problem = ""
        for interface in network.interfaces:
            was_open = guarded.gated_netns != guarded.netns and not await self._gate_worker.stands(
                interface.ifindex
            )
            seconds = await self._gate_worker.install(interface.ifindex, config)
            if was_open:
                self._on_first_gate(guarded.pod)
            if interface.ifindex not in guarded.gates:
                self._metrics.attach_seconds.observe(seconds)
                log.info(
                    "interface gated",
                    pod=guarded.pod.full_name,
                    interface=interface.name,
                    ifindex=interface.ifindex,
                    mode=guarded.pod.mode.label,
                    milliseconds=round(seconds * 1000, 2),
                )
            guarded.gates[interface.ifindex] = interface
            guarded.chain_problem = await self._places.keep(interface) or guarded.chain_problem

    async def _open(self, guarded: PodState, network: PodNetwork) -> None:
        """Take away every gate: podgate-cni goes by the node's default, not by the pod's mode."""
        await self.release(guarded)
        opened = frozenset(interface.ifindex for interface in network.interfaces)
        if opened != guarded.ungated_interfaces:
            guarded.ungated_interfaces = opened
            guarded.recheck_until = asyncio.get_running_loop().time() + _PLUGIN_SECONDS
        for interface in network.interfaces:
            if await self._gate_worker.stands(interface.ifindex):
                await self._gate_worker.remove(interface.ifindex)

    async def _forget_vanished(self, guarded: PodState) -> None:
        """Drop what is left of gates whose interface is gone.

        An interface that is only no longer seen as the pod's keeps its gate: a netns path that is
        missing for a moment must not open it.
        """
        network = guarded.network
        current = {interface.ifindex for interface in network.interfaces} if network else set()
        for ifindex in guarded.gates.keys() - current:
            if not await self._reader.exists(ifindex):
                await self._remove(guarded, ifindex)

    async def _remove(self, guarded: PodState, ifindex: int) -> None:
        await self._gate_worker.remove(ifindex)
        self._places.forget(ifindex)
        del guarded.gates[ifindex]


def _describe(guarded: PodState, network: PodNetwork) -> str:
    gated = ", ".join(interface.name for interface in network.interfaces)
    text = f"Gate on {gated}, sandbox net:[{guarded.netns.inode if guarded.netns else '?'}]."
    if guarded.admission and guarded.admission.problem:
        text += f" {guarded.admission.problem}"
    if guarded.claims.problem:
        text += f" {guarded.claims.problem}"
    if guarded.chain_problem:
        text += f" {guarded.chain_problem}"
    if guarded.pod.manifest_problem:
        text += f" {guarded.pod.manifest_problem.message}"
    return text
