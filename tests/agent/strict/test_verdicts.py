"""The relay that serves has every verdict; a new one gets them before it is engaged."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from agent.pods.conditions import Conditions
from agent.pods.pod_modes import PodModes
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.probing.answered_probes import AnsweredProbes
from agent.relay import messages
from agent.strict.stats import ConnectionStats
from agent.strict.supervisor import RelaySupervisor
from bpf.verdicts import Mode
from tests.agent.probing.answering import HEALTHZ, OWN_CHECK, check, spec
from tests.agent.strict.scripted_relay import ScriptedLauncher, ScriptedRelay
from tests.agent.strict.strict_pods import strict_pod

pytestmark = pytest.mark.looptime

ONE, SIX, OTHER = "198.18.1.1", "fd00:18::1", "198.18.1.2"
SPEC = spec({"livenessProbe": HEALTHZ}, {"liveness": OWN_CHECK})
WEB = "uid-web"


class Node:
    """Pods with answered probes, a supervisor, and scripted relays."""

    def __init__(self) -> None:
        self.store = PodStore(Conditions())
        self.launcher = ScriptedLauncher()
        self.answered = AnsweredProbes()
        self.supervisor = RelaySupervisor(
            self.launcher,
            modes=PodModes(Mode.AUDIT),
            store=self.store,
            stats=ConnectionStats(self.store),
            answered=self.answered,
        )

    def add(self, name: str, *addresses: str, mode: Mode = Mode.STRICT) -> PodState:
        pod = strict_pod(name, *addresses, mode=mode)
        pod.pod = msgspec.structs.replace(pod.pod, spec=SPEC)
        self.store.pods[pod.pod.uid] = pod
        self.answered.set_pod(pod.pod.uid, SPEC, addresses, {"app": "c1"})
        self.store.desired.mark(pod.pod.uid)
        return pod


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Node]:
    node = Node()
    running = [
        asyncio.create_task(node.supervisor.run()),
        asyncio.create_task(node.supervisor.verdicts.run()),
    ]
    try:
        yield node
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await node.launcher.close()


def received(relay: ScriptedRelay) -> list[messages.Verdict]:
    """All verdicts that it received, in order."""
    sets = [one for one in relay.received if isinstance(one, messages.SetVerdicts)]
    return [entry for one in sets for entry in one.entries]


def latest(relay: ScriptedRelay) -> dict[str, messages.Verdict]:
    return {verdict.target_key: verdict for verdict in received(relay)}


async def test_targets_have_the_answers_of_their_address() -> None:
    async with running() as node:
        node.add("web", ONE, SIX)
        await asyncio.sleep(0.5)
        (update,) = (
            one for one in node.launcher.newest.received if isinstance(one, messages.SetTargets)
        )
        hosts = {}
        for target in update.targets:
            (answer,) = target.answers
            assert isinstance(answer.request, messages.HttpRequest)
            hosts[target.address] = answer.request.sent.split(b"\r\n")[1]
        assert hosts == {
            ONE: f"Host: {ONE}:8080".encode(),
            SIX: f"Host: [{SIX}]:8080".encode(),
        }


async def test_result_is_sent_for_each_address_at_once() -> None:
    async with running() as node:
        node.add("web", ONE, SIX)
        node.add("other", OTHER)
        await asyncio.sleep(0.5)
        before = len(received(node.launcher.newest))
        node.answered.record(check(WEB, passes=False, message="ill", finished_ns=7))
        await asyncio.sleep(0.5)
        entries = received(node.launcher.newest)[before:]
        assert [(entry.target_key, entry.is_healthy, entry.reason) for entry in entries] == [
            (f"{WEB} {ONE}", False, "ill"),
            (f"{WEB} {SIX}", False, "ill"),
        ]
        assert {entry.ends_ns for entry in entries} == {11_000_000_007}


async def test_results_of_one_moment_are_one_message() -> None:
    async with running() as node:
        for number in range(1, 40):
            node.add(f"web{number}", f"198.18.1.{number}")
        await asyncio.sleep(0.5)
        before = len(node.launcher.newest.received)
        for number in range(1, 40):
            node.answered.record(check(f"uid-web{number}"))
            await asyncio.sleep(0)
        await asyncio.sleep(0.5)
        assert len(node.launcher.newest.received) == before + 1


async def test_verdict_is_withdrawn_when_the_container_restarts() -> None:
    async with running() as node:
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        node.answered.record(check(WEB))
        await asyncio.sleep(0.5)
        assert latest(node.launcher.newest)[f"{WEB} {ONE}"].ends_ns is not None
        node.answered.set_pod(WEB, SPEC, (ONE,), {"app": "c2"})
        await asyncio.sleep(0.5)
        withdrawn = latest(node.launcher.newest)[f"{WEB} {ONE}"]
        (answer,) = node.answered.answers(WEB, ONE)
        assert withdrawn == messages.Verdict(f"{WEB} {ONE}", answer.id, False, "", None)


async def test_new_relay_has_all_verdicts_before_it_is_engaged() -> None:
    async with running() as node:
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        node.answered.record(check(WEB, finished_ns=7))
        await asyncio.sleep(0.5)
        await node.supervisor.restart()
        relay = node.launcher.newest
        assert len(node.launcher.relays) == 2
        kinds = [type(message) for message in relay.received]
        engaged = kinds.index(messages.Engage)
        assert kinds.index(messages.SetVerdicts) < engaged
        assert latest(relay)[f"{WEB} {ONE}"].ends_ns == 11_000_000_007


async def test_verdict_of_a_pod_is_not_sent_again_for_another_pod() -> None:
    async with running() as node:
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        node.answered.record(check(WEB, finished_ns=7))
        await asyncio.sleep(0.5)
        before = len(received(node.launcher.newest))
        node.add("other", OTHER)
        await asyncio.sleep(0.5)
        later = received(node.launcher.newest)[before:]
        assert {verdict.target_key for verdict in later} == {f"uid-other {OTHER}"}


async def test_changed_answers_are_sent_at_once() -> None:
    async with running() as node:
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        node.answered.forget(WEB)
        await asyncio.sleep(0.2)
        first, changed = node.launcher.newest.updates()
        assert isinstance(first, messages.SetTargets)
        assert isinstance(changed, messages.ChangeTargets)
        assert [len(target.answers) for target in (*first.targets, *changed.changed)] == [1, 0]


async def test_relay_gets_all_verdicts_again_with_all_targets() -> None:
    async with running() as node:
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        node.answered.record(check(WEB, finished_ns=7))
        await asyncio.sleep(0.5)
        before = len(received(node.launcher.newest))
        await asyncio.sleep(32)
        (again,) = received(node.launcher.newest)[before:]
        assert (again.target_key, again.ends_ns) == (f"{WEB} {ONE}", 11_000_000_007)


async def test_verdict_that_comes_while_the_relay_is_engaged_is_sent() -> None:
    async with running() as node:

        class Slow(ScriptedRelay):
            def send(self, message: messages.FromRelay) -> None:
                delay = 0.0
                if isinstance(message, messages.Engaged):
                    node.answered.record(check(WEB, finished_ns=9))
                    delay = 0.1
                asyncio.get_running_loop().call_later(delay, super().send, message)

        node.launcher.next = Slow
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        assert latest(node.launcher.newest)[f"{WEB} {ONE}"].ends_ns == 11_000_000_009


async def test_verdict_of_a_pod_that_was_not_a_target_yet_is_sent_with_it() -> None:
    async with running() as node:
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        node.add("other", OTHER)
        node.answered.record(check("uid-other", finished_ns=7))
        await asyncio.sleep(0.5)
        assert latest(node.launcher.newest)[f"uid-other {OTHER}"].ends_ns == 11_000_000_007


async def test_nothing_is_sent_of_a_pod_that_is_not_in_strict() -> None:
    async with running() as node:
        node.add("web", ONE)
        node.add("open", OTHER, mode=Mode.ENFORCE)
        await asyncio.sleep(0.5)
        node.answered.record(check("uid-open"))
        await asyncio.sleep(0.5)
        assert set(latest(node.launcher.newest)) == {f"{WEB} {ONE}"}


async def test_new_answers_do_not_make_the_pod_count_as_bypassed() -> None:
    async with running() as node:
        web = node.add("web", ONE)
        await asyncio.sleep(0.5)
        assert node.supervisor.pods.problem_for(web) is None
        node.answered.forget(WEB)
        assert node.supervisor.pods.problem_for(web) is None


async def test_verdict_of_a_pod_that_is_forgotten_is_withdrawn() -> None:
    async with running() as node:
        node.add("web", ONE)
        await asyncio.sleep(0.5)
        node.answered.record(check(WEB))
        await asyncio.sleep(0.5)
        node.answered.forget(WEB)
        await asyncio.sleep(0.5)
        assert latest(node.launcher.newest)[f"{WEB} {ONE}"].ends_ns is None
