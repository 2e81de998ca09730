"""The gates of one pod: attached to its interfaces, with its rules, and the resulting status."""

import asyncio
import contextlib
import dataclasses
import datetime
import time
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

import msgspec
import structlog

from agent.gates.address_claims import AddressAuthority
from agent.gates.chain_order import ChainOrder
from agent.gates.crowds import Crowds
from agent.gates.grace_periods import GRACE_SECONDS
from agent.gates.metrics import GateMetrics
from agent.gates.worker import GateWorker
from agent.linux.pod_network import HostInterface, PodNetwork, PodNetworkReader
from agent.logs import Event
from agent.pods import modes
from agent.pods.conditions import FALSE, TRUE
from agent.pods.isolation import AUDITED, ENFORCED, GATE_LOST
from agent.pods.pod import Pod
from agent.pods.pod_state import Admission, IsolationStatus, PodState
from agent.pods.store import PodStore
from bpf.errors import AttachError, BpfError
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsError, NetnsGoneError, NetnsUnreadableError

log = structlog.get_logger(__name__)

# podgate-cni finishes within 20 s, and does not notify the agent.
_PLUGIN_SECONDS = 25.0

# podgate-cni removes the gate, then the network plugin the interface, within milliseconds.
_DELETION_SECONDS = 2.0

_REASONS = {Mode.AUDIT: AUDITED, Mode.ENFORCE: ENFORCED, Mode.STRICT: ENFORCED}


class Admitter(Protocol):
    """Where the rules of gates come from."""

    async def admit(self, pod: Pod) -> Admission:
        """What the pod's gates admit."""


class PodGates:
    """Brings pods' gates into the desired state. Not concurrent: one pod after the other."""

    def __init__(
        self,
        *,
        store: PodStore,
        gate_worker: GateWorker,
        reader: PodNetworkReader,
        authority: AddressAuthority,
        admitter: Admitter,
        chain_order: ChainOrder,
        crowds: Crowds,
        metrics: GateMetrics,
        has_fallback: bool = True,
    ) -> None:
        """has_fallback: whether pods in strict admit the kubelet while no relay serves them."""
        self._store = store
        self._gate_worker = gate_worker
        self._gates = gate_worker.gates
        self._reader = reader
        self._authority = authority
        self._admitter = admitter
        self._chain_order = chain_order
        self._crowds = crowds
        self._metrics = metrics
        self._has_fallback = has_fallback
        self._reads: dict[Netns, asyncio.Task[PodNetwork]] = {}

    @contextlib.asynccontextmanager
    async def reading(self, states: Collection[PodState]) -> AsyncIterator[None]:
        """Read the networks of these pods side by side, for their `reconcile` in the block.

        Their marks are to be taken before: a network that changes meanwhile is marked again.
        """
        tasks: list[asyncio.Task[PodNetwork]] = []
        for state in states:
            if not (path := state.pod.netns_path):
                continue
            with contextlib.suppress(NetnsError):
                netns = Netns.open(path)
                tasks.append(asyncio.create_task(self._reader.read(netns)))
                self._reads[netns] = tasks[-1]
        try:
            yield
        finally:
            self._reads.clear()
            for task in tasks:
                task.cancel()
            # Errors concern the pods that were reconciled.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, netns: Netns) -> PodNetwork:
        started = self._reads.pop(netns, None)
        return await (self._reader.read(netns) if started is None else started)

    async def reconcile(self, state: PodState) -> IsolationStatus:
        """One pass over one pod; safe to repeat at any time.

        Raises `AttachError`, `NetnsUnreadableError`, `OSError` or `TimeoutError`: its state is
        unknown.
        """
        pod = state.pod
        if pod.host_network:
            return IsolationStatus(
                TRUE, "HostNetwork", "The pod uses the host network; it is not gated."
            )
        if pod.netns_path is None:
            await self._remove_vanished(state, set())
            problem = pod.manifest_problem
            return IsolationStatus(
                FALSE,
                problem.reason if problem else "NetnsMissing",
                problem.message if problem else "The manifest names no network namespace.",
            )
        try:
            netns = Netns.open(pod.netns_path)
        except NetnsGoneError as error:
            await self._remove_vanished(state, set())
            return IsolationStatus(FALSE, "NetnsNotFound", str(error))
        except NetnsUnreadableError:
            raise
        except NetnsError as error:
            return IsolationStatus(FALSE, "NetnsInvalid", str(error))
        if other := self._store.netns_owner(netns, pod):
            return IsolationStatus(
                FALSE,
                "NetnsInUse",
                f"{netns.path} is already the network namespace of pod {other.full_name}; "
                "use one per pod.",
            )
        return await self._reconcile_netns(state, netns)

    async def update_rules(self, states: Collection[PodState]) -> set[str]:
        """Write the rules of these pods' gates, all at once, and nothing else.

        Returns the uids of pods for which that was enough; the others need a pass, as those with
        problems do. Raises `TimeoutError`.
        """
        uids: dict[int, str] = {}
        configs: dict[int, GateConfig] = {}
        for state in states:
            before = state.admission
            if before is None or state.network is None or state.pod.mode is Mode.OFF:
                continue
            admission = await self._admitter.admit(state.pod)
            if state.gate_problem or state.has_failed or admission.problem != before.problem:
                continue
            state.admission = admission
            config = self._config(state, state.network, admission)
            configs |= dict.fromkeys(state.gates, config)
            uids |= dict.fromkeys(state.gates, state.pod.uid)
        failed = await self._gate_worker.run(_configure, self._gates, configs)
        return set(uids.values()) - {uids[ifindex] for ifindex in failed}

    async def detach(self, state: PodState) -> None:
        """Remove the pod's gates."""
        for ifindex in list(state.gates):
            await self._remove(state, ifindex)

    async def _reconcile_netns(
        self, state: PodState, netns: Netns, *, is_retry: bool = False
    ) -> IsolationStatus:
        try:
            network = await self._read(netns)
        except NetnsGoneError as error:
            return IsolationStatus(FALSE, "NetnsNotFound", str(error))
        state.netns = netns
        state.network = network
        pod = state.pod
        state.claims = await self._authority.check(pod, netns, network)
        self._report_claims(state)
        if pod.kept_up_to > pod.mode:
            pod = state.pod = await self._with_kept_mode(pod, network)
        if pod.mode is Mode.OFF:
            await self._detach_all(state, network)
            state.gated_netns = netns
            message = f"Mode off: interfaces are not gated.{_pod_problems(pod)}"
            return IsolationStatus(TRUE, "Off", message)

        await self._remove_vanished(state, {i.ifindex for i in network.interfaces})
        try:
            await self._install(state)
        except AttachError as error:
            if not is_retry and await self._has_vanished(network):
                return await self._reconcile_netns(state, netns, is_retry=True)
            if state.gated_netns != netns:
                return IsolationStatus(FALSE, "GateFailed", f"{error}.")
            await self._report_failure(state, network, error)
        if network.unsupported:
            state.gated_netns = netns
            return IsolationStatus(TRUE, "NotSupported", "; ".join(network.unsupported) + ".")
        if not network.interfaces:
            return IsolationStatus(
                FALSE, "NoInterface", f"Waiting for a veth pair between {netns.path} and the host."
            )
        state.gated_netns = netns
        reason = GATE_LOST if state.is_gate_lost else _REASONS[pod.mode]
        return IsolationStatus(TRUE, reason, _describe(state, network))

    async def _with_kept_mode(self, pod: Pod, network: PodNetwork) -> Pod:
        """The pod in the mode that its gates have, if that is stricter and may be kept."""
        kept = await self._gate_worker.run(
            _strictest, self._gates, [interface.ifindex for interface in network.interfaces]
        )
        mode = min(kept, pod.kept_up_to)
        if mode <= pod.mode:
            return pod
        problem = modes.kept(mode)
        return msgspec.structs.replace(
            pod, mode=mode, mode_problems=(*pod.mode_problems, problem), kept_up_to=mode
        )

    async def _report_failure(
        self, state: PodState, network: PodNetwork, error: AttachError
    ) -> None:
        """The gate of a pod that had one cannot be brought into the desired state.

        The deletion of a pod removes gate and interface in steps: then it is reported if it lasts.
        """
        pod = state.pod
        now = asyncio.get_running_loop().time()
        if not state.has_failed:
            state.has_failed, state.failed_at = True, now
        if pod.is_deleting and now - state.failed_at < _DELETION_SECONDS:
            return
        run = self._gate_worker.run
        lost = [
            interface.name
            for interface in network.interfaces
            if not await run(self._gates.is_in_chain, interface.ifindex)
        ]
        state.is_gate_lost = bool(lost)
        if lost:
            self._metrics.gates_lost.inc()
            log.error(Event.GATE_LOST, pod=pod.full_name, error=str(error))
            state.gate_problem = (
                f"{', '.join(lost)} lost its gate, which cannot be attached again yet: {error}."
            )
        else:
            self._metrics.gate_updates_failed.inc()
            log.error(Event.GATE_NOT_UPDATED, pod=pod.full_name, error=str(error))
            state.gate_problem = (
                f"The gate keeps its last addresses and rules; it cannot be updated yet: {error}."
            )

    def _report_claims(self, state: PodState) -> None:
        problem = state.claims.problem
        if self._authority.is_due(state.pod.uid, state.claims):
            log.warning(Event.ADDRESSES_UNCONFIRMED, pod=state.pod.full_name, problem=problem)

    async def _install(self, state: PodState) -> None:
        network = state.network
        assert network is not None
        state.admission = await self._admitter.admit(state.pod)
        config = self._config(state, network, state.admission)
        previous_problem = "" if state.has_failed else state.gate_problem
        state.gate_problem = state.chain_problem = ""
        for interface in network.interfaces:
            is_first_gate = state.gated_netns != state.netns
            if is_first_gate:
                self._crowds.arrive()
            quickly = self._crowds.is_under_way
            # Calls for other pods' relays and reply tables may wait for the thread.
            is_awaited = state.pod.uid in self._store.awaited
            run = self._gate_worker.run_first if is_awaited else self._gate_worker.run
            installed = await run(_install, self._gates, interface.ifindex, config, quickly=quickly)
            state.gate_problem = installed.problem or state.gate_problem
            if is_first_gate and not installed.was_attached:
                state.first_gated_at = datetime.datetime.now(datetime.UTC)
            if interface.ifindex not in state.gates:
                self._metrics.attach_seconds.observe(installed.seconds)
                log.info(
                    Event.INTERFACE_GATED,
                    pod=state.pod.full_name,
                    interface=interface.name,
                    ifindex=interface.ifindex,
                    mode=state.pod.mode.label,
                    milliseconds=round(installed.seconds * 1000, 2),
                )
            state.gates[interface.ifindex] = interface
            if installed.is_first:
                self._chain_order.found_first(interface.ifindex)
                continue
            problem = await self._chain_order.ensure_first(
                interface, is_deleting=state.pod.is_deleting
            )
            state.chain_problem = problem or state.chain_problem
        state.has_failed = state.is_gate_lost = False
        if state.gate_problem and state.gate_problem != previous_problem:
            log.warning(Event.GATE_HAS_NO_ROOM, pod=state.pod.full_name, problem=state.gate_problem)

    def _config(self, state: PodState, network: PodNetwork, admission: Admission) -> GateConfig:
        return GateConfig(
            state.pod.mode,
            state.claims.confirmed,
            admission.rules,
            claimed=tuple(a for a in network.addresses if a not in state.claims.confirmed),
            without_fallback=not self._has_fallback,
            pod=state.pod.uid,
        )

    async def _detach_all(self, state: PodState, network: PodNetwork) -> None:
        """Remove every gate: podgate-cni applies the namespace's mode, not the pod's."""
        await self.detach(state)
        ungated = frozenset(interface.ifindex for interface in network.interfaces)
        if ungated != state.ungated_interfaces:
            state.ungated_interfaces = ungated
            state.recheck_until = asyncio.get_running_loop().time() + _PLUGIN_SECONDS
        for interface in network.interfaces:
            if await self._is_attached(interface):
                await self._gate_worker.remove(interface.ifindex)

    async def _is_attached(self, interface: HostInterface) -> bool:
        return await self._gate_worker.run(self._gates.is_attached, interface.ifindex)

    async def _has_vanished(self, network: PodNetwork) -> bool:
        """Whether one of the pod's interfaces was deleted after `network` was read."""
        for interface in network.interfaces:
            if not await self._reader.exists(interface.ifindex):
                return True
        return False

    async def _remove_vanished(self, state: PodState, current: Collection[int]) -> None:
        """Remove gates whose interface no longer exists.

        An interface that exists but is no longer listed as the pod's keeps its gate: a netns path
        that is missing for a moment must not open it.
        """
        for ifindex in state.gates.keys() - set(current):
            if not await self._reader.exists(ifindex):
                await self._remove(state, ifindex)

    async def _remove(self, state: PodState, ifindex: int) -> None:
        await self._gate_worker.remove(ifindex)
        self._chain_order.forget(ifindex)
        del state.gates[ifindex]


@dataclasses.dataclass(frozen=True, slots=True)
class _Installed:
    """A gate that was installed. seconds: without the wait for the thread; problem: what `install`
    returns; is_first: whether no other program runs before it, as far as that can be read."""

    was_attached: bool
    seconds: float
    problem: str
    is_first: bool


def _install(gates: Gates, ifindex: int, config: GateConfig, *, quickly: bool) -> _Installed:
    """In one call, since the event loop may be busy between two."""
    was_attached = gates.is_attached(ifindex)
    gates.breathe()
    started = time.perf_counter()
    problem = gates.install(ifindex, config, grace_seconds=GRACE_SECONDS, quickly=quickly)
    seconds = time.perf_counter() - started
    gates.breathe()
    try:
        is_first = gates.is_first(ifindex)
    except BpfError:
        is_first = False
    return _Installed(was_attached, seconds, problem, is_first)


def _strictest(gates: Gates, ifindexes: Collection[int]) -> Mode:
    """The strictest mode of the gates on these interfaces, also of podgate-cni's."""
    return max((gates.mode_of(ifindex) for ifindex in ifindexes), default=Mode.OFF)


def _configure(gates: Gates, configs: Mapping[int, GateConfig]) -> list[int]:
    """Interfaces whose gates are not as in `configs` now: gone, or without room."""
    failed = []
    for ifindex, config in configs.items():
        try:
            if not gates.is_attached(ifindex) or gates.configure(ifindex, config):
                failed.append(ifindex)
        except BpfError:
            failed.append(ifindex)
    return failed


def _describe(state: PodState, network: PodNetwork) -> str:
    gated = ", ".join(interface.name for interface in network.interfaces)
    text = f"Gate attached to {gated}, sandbox net:[{state.netns.inode if state.netns else '?'}]."
    if state.admission and state.admission.problem:
        text += f" {state.admission.problem}"
    if state.claims.problem:
        text += f" {state.claims.problem}"
    if state.gate_problem:
        text += f" {state.gate_problem}"
    if state.chain_problem:
        text += f" {state.chain_problem}"
    if state.pod.manifest_problem:
        text += f" {state.pod.manifest_problem.message}"
    return text + _pod_problems(state.pod)


def _pod_problems(pod: Pod) -> str:
    problems = (*pod.mode_problems, *pod.host_problems)
    return "".join(f" {problem.message}" for problem in problems)
