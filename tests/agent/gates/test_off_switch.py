"""What the off switch does with gates: they open before hooks are detached, and close again."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog.testing

from agent.gates import off_switch
from agent.gates.off_switch import OffSwitch
from agent.linux.pod_network import HostInterface
from agent.logs import Event
from agent.pods.changes import Changes
from agent.pods.conditions import Conditions
from agent.pods.modes import NodeModes
from agent.pods.pod import Pod
from agent.pods.pod_modes import NODE
from agent.pods.store import PodStore
from bpf.verdicts import Mode
from tests import polling

OFF = NodeModes(default=Mode.ENFORCE, ceiling=Mode.OFF)
ON = NodeModes(default=Mode.ENFORCE)


class _Worker:
    """The gate worker, with what it was called for, in order."""

    def __init__(self) -> None:
        self.gates = self
        self.is_attached = True
        self.calls: list[object] = []
        self.failure: Exception | None = None
        """What opening the gates raises."""

    async def run_first(self, function: Callable[..., None], *args: object) -> None:
        function(*args)

    def open(self, ifindexes: list[int]) -> None:
        if self.failure:
            raise self.failure
        self.calls.append(ifindexes)

    async def attach(self) -> None:
        self.is_attached = True
        self.calls.append("attach")

    async def detach(self) -> None:
        self.is_attached = False
        self.calls.append("detach")


class _Modes:
    def __init__(self) -> None:
        self.node = ON
        self.changes = Changes()

    def set(self, node: NodeModes) -> None:
        self.node = node
        self.changes.mark(NODE)


class _HostDevices:
    def __init__(self) -> None:
        self.has_programs = False


@pytest.fixture
def store() -> PodStore:
    made = PodStore(Conditions())
    made.set_pod(Pod(uid="web", namespace="shop", name="web", mode=Mode.ENFORCE))
    made.pods["web"].gates[7] = HostInterface(7, "veth7")
    made.relay_gates[9] = "podgate-relay0"
    return made


class _Switch:
    """A switch, and what it has to do with."""

    def __init__(self, store: PodStore) -> None:
        self.worker, self.modes, self.devices = _Worker(), _Modes(), _HostDevices()
        self.changes = 0
        this: Any = self
        self.switch = OffSwitch(
            *(this.worker, this.modes, store),
            host_devices=this.devices,
            on_changed=self._count_change,
        )

    def has_changed(self, times: int) -> bool:
        return self.changes == times

    def _count_change(self) -> None:
        self.changes += 1


@pytest.fixture
def made(store: PodStore) -> _Switch:
    return _Switch(store)


@pytest.fixture
async def running(made: _Switch) -> AsyncIterator[tuple[_Worker, _Modes]]:
    task = asyncio.create_task(made.switch.run())
    yield made.worker, made.modes
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("modes", "calls"), [(ON, ["attach"]), (OFF, [[7], "detach"])])
async def test_agent_that_starts_attaches_nothing_while_podgate_is_off(
    made: _Switch, modes: NodeModes, calls: list[object]
) -> None:
    made.modes.node = modes
    await made.switch.open()
    assert made.worker.calls == calls


async def test_what_remains_is_named_until_nothing_does(made: _Switch, store: PodStore) -> None:
    switch = made.switch
    made.devices.has_programs = True
    assert switch.remains() == ["gates", "hooks", "programs on host devices"]
    made.modes.node = OFF
    made.worker.failure = OSError("busy")
    await switch.open()
    made.worker.is_attached = made.devices.has_programs = False
    # Some may still be attached.
    assert switch.remains() == ["gates", "hooks"]
    made.worker.failure = None
    await switch.open()
    assert switch.remains() == ["gates"]
    store.pods["web"].gates.clear()
    assert switch.remains() == []


async def test_what_follows_programs_learns_of_each_change_and_the_log_has_it(
    made: _Switch, running: tuple[_Worker, _Modes]
) -> None:
    worker, modes = running
    with structlog.testing.capture_logs() as lines:
        for number, node in enumerate((OFF, OFF, ON, ON), start=1):
            modes.set(node)
            changes = (number + 1) // 2
            await polling.until("a change", functools.partial(made.has_changed, changes))
            await asyncio.sleep(0)
    assert worker.calls == [[7], "detach", "attach"]
    assert made.changes == 2
    assert [(line["event"], line["log_level"]) for line in lines] == [
        (Event.SWITCHED_OFF, "warning"),
        (Event.SWITCHED_ON, "info"),
    ]


async def test_gates_of_pods_open_before_hooks_are_detached(
    running: tuple[_Worker, _Modes],
) -> None:
    worker, modes = running
    modes.set(OFF)
    await polling.until("off", lambda: len(worker.calls) == 2)
    assert worker.calls == [[7], "detach"]


async def test_gates_close_again_also_of_pods_whose_mode_has_not_changed(
    running: tuple[_Worker, _Modes], store: PodStore
) -> None:
    worker, modes = running
    modes.set(OFF)
    await polling.until("off", lambda: len(worker.calls) == 2)
    store.to_reconcile.take_one("web")
    assert store.to_reconcile.is_empty
    modes.set(ON)
    await polling.until("marked", lambda: not store.to_reconcile.is_empty)
    assert worker.calls[-1] == "attach"


async def test_gates_that_cannot_be_opened_are_retried_and_logged_once_for_each_reason(
    running: tuple[_Worker, _Modes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(off_switch, "_RETRY_SECONDS", 0.01)
    worker, modes = running
    with structlog.testing.capture_logs() as lines:

        def errors() -> list[str]:
            return [line["error"] for line in lines if line["event"] is Event.HOOKS_NOT_DETACHED]

        worker.failure = OSError("busy")
        modes.set(OFF)
        await polling.until("the first", lambda: errors() == ["busy"])
        await asyncio.sleep(0.1)
        worker.failure = TimeoutError()
        await polling.until("another", lambda: len(errors()) == 2)
        await asyncio.sleep(0.1)
        worker.failure = None
        await polling.until("off", lambda: worker.calls == [[7], "detach"])
    assert errors() == ["busy", "the kernel did not respond in time"]
