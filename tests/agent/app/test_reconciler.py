"""In which order pods are guarded: closing comes first, whatever pods come meanwhile."""

import asyncio
from unittest import mock

from agent.app.reconciler import Reconciler
from agent.linux.pod_network import NodeInterface
from agent.pods.conditions import TRUE, Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import GracePeriod, IsolationStatus, PodState


class FakeGuard:
    """Writes down what it is asked for; a new pod comes while the first one is remembered."""

    def __init__(self, reconciler: Reconciler, late: Pod) -> None:
        self.calls: list[str] = []
        self.done = asyncio.Event()
        self._reconciler = reconciler
        self._late: Pod | None = late

    async def bring_up(self, guarded: PodState) -> IsolationStatus:
        self.calls.append(f"close {guarded.pod.name}")
        return IsolationStatus(TRUE, "Enforced", "")

    async def remember(self, guarded: PodState) -> list[GracePeriod]:
        self.calls.append(f"remember {guarded.pod.name}")
        if self._late is not None:
            self._reconciler.set_pod(self._late)
            self._late = None
        return [GracePeriod(guarded.pod.name, NodeInterface(1, "veth0"), 0, "", 0)]

    async def end(self, grace: GracePeriod) -> None:
        self.calls.append(f"end grace of {grace.pod}")
        if sum(call.startswith("end") for call in self.calls) == 3:
            self.done.set()


async def nothing(*_: object) -> None:
    pass


async def test_closing_comes_before_remembering_and_graces_end_last() -> None:
    gate_worker = mock.Mock()
    gate_worker.installed = mock.AsyncMock(return_value={})
    gate_worker.collect = mock.AsyncMock(return_value=True)
    reconciler = Reconciler(
        gate_worker=gate_worker,
        reader=mock.Mock(),
        conditions=Conditions(on_change=lambda uid: None),
        probing=mock.Mock(),
        metrics=mock.Mock(),
        resync_seconds=60.0,
        admit=mock.AsyncMock(),
        on_gated=nothing,
        on_change=lambda: None,
        why_not_strict=lambda guarded: None,
        other_gates=lambda: (),
        unready_because=lambda: None,
        on_first_gate=lambda pod: None,
        on_gate_lost=lambda pod, why: None,
        on_unconfirmed_address=lambda pod, why: None,
        authority=mock.Mock(),
    )
    first, second, late = (Pod(uid=name, namespace="demo", name=name) for name in "abc")
    guard = FakeGuard(reconciler, late)
    reconciler._guard = guard  # type: ignore[assignment]
    for pod in (first, second):
        reconciler.set_pod(pod)
    running = asyncio.create_task(reconciler.run())
    async with asyncio.timeout(20):
        await guard.done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert guard.calls == [
        *("close a", "close b"),
        *("remember a", "close c", "remember b", "remember c"),
        *("end grace of a", "end grace of b", "end grace of c"),
    ]
