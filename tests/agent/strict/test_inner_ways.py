"""Pods in strict are tried from inside: at once, every few seconds, and no others."""

import asyncio
import contextlib
import errno
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import structlog.testing

from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from agent.strict import inner_ways
from agent.strict.hookless_pods import HooklessPods
from agent.strict.inner_ways import InnerWayWatch
from bpf.errors import BpfError
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsGoneError
from probes.redirection import Dropped, InnerTries, InnerWay, InnerWays, Redirection
from tests.agent.strict.strict_pods import strict_pod

pytestmark = pytest.mark.looptime

ONE, OTHER = "198.18.1.1", "198.18.1.2"
CONSUL = InnerWay(Redirection(15001, 5995, "Consul"), 5995)
OF_NO_USER = InnerWay(Redirection(15001, 0, "Istio"), None)


class Hookless:
    """All pods are, until they get rules."""

    def __init__(self, on_hooked: Callable[[set[str]], None]) -> None:
        self.on_hooked = on_hooked
        self.inspected: list[str] = []
        self.compared: set[str] = set()
        self.is_closed = False

    def __contains__(self, uid: object) -> bool:
        return uid in self.compared

    def inspect(self, uid: str, netns: Netns) -> None:
        self.inspected.append(uid)

    def forget(self, uid: str) -> None:
        self.compared.discard(uid)

    def compare(self) -> None:
        self.compared |= {*self.inspected}

    def hook(self, uid: str) -> None:
        self.inspected = [one for one in self.inspected if one != uid]
        self.compared.discard(uid)
        self.on_hooked({uid})

    def close(self) -> None:
        self.is_closed = True


class Node:
    """Pods, their rules by address, and what was tried."""

    def __init__(self) -> None:
        self.store = PodStore(Conditions())
        self.rules: dict[str, InnerWay] = {}
        self.probed: dict[str, InnerWay] = {}
        """Of single ports."""
        self.before: list[InnerWays] = []
        self.gone: set[str] = set()
        self.needs: set[str] = set()
        self.tried: list[str] = []
        self.silent: set[str] = set()
        """Addresses of busy pods, or with a firewall."""
        self.dropped: dict[str, InnerWay] = {}
        self.can_compare = False
        self.hookless: Hookless | None = None
        self.may_find = threading.Event()
        self.may_find.set()
        self.watch = InnerWayWatch(
            self.store,
            has_need=lambda state: state.pod.name in self.needs,
            probed=lambda _, addresses: _of(self.probed, addresses),
            find=self.find,
            find_dropped=self.find_dropped,
            open_hookless=self.open_hookless,
        )
        self.changes = self.store.in_force.subscribe()

    def find(self, netns: Netns, addresses: Iterable[str], before: InnerWays) -> InnerTries:
        self.tried += addresses
        self.before.append(before)
        if netns.path in self.gone:
            raise NetnsGoneError("it is gone")
        silent = [one for one in addresses if one in self.silent and one not in self.rules]
        return InnerTries(_of(self.rules, addresses), silent)

    def find_dropped(self, _: Netns, addresses: Iterable[str]) -> dict[str, InnerWay]:
        assert self.may_find.wait(60)
        return {one: self.dropped[one] for one in addresses if one in self.dropped}

    async def open_hookless(self, on_hooked: Callable[[set[str]], None]) -> HooklessPods:
        if not self.can_compare:
            raise BpfError(errno.EPERM, "no memory can be read")
        self.hookless = Hookless(on_hooked)
        return cast(HooklessPods, self.hookless)

    def add(self, pod: PodState) -> PodState:
        """A pod that was not tried yet."""
        pod.inner_ways = None
        self.store.pods[pod.pod.uid] = pod
        self.store.in_force.mark(pod.pod.uid)
        return pod

    def ways(self, pod: PodState) -> InnerWays | None:
        return pod.inner_ways


def _of(ways: dict[str, InnerWay], addresses: Iterable[str]) -> dict[str, InnerWay]:
    return {one: ways[one] for one in addresses if one in ways}


@contextlib.asynccontextmanager
async def watched(*, can_compare: bool = False) -> AsyncIterator[Node]:
    """In the test: a fixture has another clock."""
    node = Node()
    node.can_compare = can_compare
    running = asyncio.create_task(node.watch.run())
    await asyncio.sleep(0)
    try:
        yield node
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_new_pod_is_tried_before_the_relay_gets_it() -> None:
    async with watched() as node:
        node.rules[ONE] = CONSUL
        web = node.add(strict_pod("web", ONE))
        node.changes.take()
        await asyncio.sleep(0.01)  # the supervisor waits for 50 ms
        assert web.inner_ways == {ONE: CONSUL}
        assert node.changes.take() == ["uid-web"]
        assert node.tried == [ONE]


async def test_new_pod_that_drops_what_comes_from_inside_gets_no_relay_meanwhile() -> None:
    async with watched() as node:
        node.silent = {ONE}
        node.dropped = {ONE: InnerWay(Dropped(8080), None)}
        node.may_find.clear()
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(0.01)
        assert node.ways(web) is None
        node.changes.take()
        node.may_find.set()
        assert await node.changes.next() == ["uid-web"]
        assert web.inner_ways == node.dropped


async def test_pod_that_answers_late_on_a_busy_machine_is_not_stepped_back() -> None:
    async with watched() as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        node.silent = {ONE}
        node.changes.take()
        await asyncio.sleep(20)
        assert web.inner_ways == {}
        assert node.changes.take() == []


async def test_pod_with_the_relay_keeps_it_while_a_new_address_of_it_is_silent() -> None:
    """Without its relay, the kubelet would connect to it past strict."""
    async with watched() as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        node.silent = {ONE, OTHER}
        node.may_find.clear()
        web.claims = strict_pod("web", ONE, OTHER).claims
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(0.01)
        assert node.tried[-2:] == [ONE, OTHER]
        assert web.inner_ways == {}
        node.dropped = {OTHER: InnerWay(Dropped(8080), None)}
        node.may_find.set()
        node.changes.take()
        assert await node.changes.next() == ["uid-web"]
        assert web.inner_ways == node.dropped


async def test_next_sandbox_of_a_pod_waits_for_its_own_try() -> None:
    async with watched() as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        node.silent = {ONE}
        node.may_find.clear()
        web.netns = Netns("/run/netns/next", 4, 7)
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(0.01)
        assert node.ways(web) is None
        node.may_find.set()
        await asyncio.sleep(1)
        assert web.inner_ways == {}


async def test_try_of_a_sandbox_that_has_ended_shows_nothing_of_the_next_one() -> None:
    async with watched() as node:
        node.silent = {ONE}
        node.may_find.clear()
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(0.01)
        web.netns = Netns("/run/netns/next", 4, 7)
        node.may_find.set()
        await asyncio.sleep(1)
        assert node.ways(web) is None
        await asyncio.sleep(5)
        assert web.inner_ways == {}


async def test_pods_that_answer_do_not_wait_for_one_that_is_silent() -> None:
    async with watched() as node:
        node.silent = {ONE}
        node.may_find.clear()
        silent, other = node.add(strict_pod("web", ONE)), node.add(strict_pod("other", OTHER))
        await asyncio.sleep(0.01)
        assert (silent.inner_ways, other.inner_ways) == (None, {})
        node.may_find.set()


@pytest.mark.parametrize("has_ways", [False, True])
async def test_pod_that_cannot_be_tried_keeps_what_it_had(has_ways: bool) -> None:
    """The process may lack descriptors, for a new pod, too."""
    async with watched() as node:
        web = strict_pod("web", ONE)
        if has_ways:
            node.rules[ONE] = CONSUL
            node.add(web)
            await asyncio.sleep(1)
        assert web.netns is not None
        node.gone = {web.netns.path}
        if not has_ways:
            node.add(web)
        await asyncio.sleep(6)
        assert web.inner_ways == ({ONE: CONSUL} if has_ways else {})


@pytest.mark.parametrize(("mode", "marks"), [(Mode.STRICT, ["uid-web"]), (Mode.ENFORCE, [])])
async def test_first_try_that_finds_nothing_is_a_change_for_the_relay_alone(
    mode: Mode, marks: list[str]
) -> None:
    async with watched() as node:
        web = node.add(strict_pod("web", ONE, mode=mode))
        node.changes.take()
        await asyncio.sleep(0.01)
        assert web.inner_ways == {}
        assert node.changes.take() == marks


async def test_rules_of_an_init_container_are_found_within_seconds() -> None:
    async with watched() as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        assert web.inner_ways == {}
        node.rules[ONE] = CONSUL
        await asyncio.sleep(5)
        assert web.inner_ways == {ONE: CONSUL}
        del node.rules[ONE]
        await asyncio.sleep(5)
        assert web.inner_ways == {}


async def test_rules_of_one_port_are_those_that_its_probe_has_found() -> None:
    async with watched() as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        node.probed[ONE] = OF_NO_USER
        await asyncio.sleep(5)
        assert web.inner_ways == {ONE: OF_NO_USER}
        # It is no way of all ports, which would be tried by its user.
        await asyncio.sleep(5)
        assert node.before[-1] == {}
        node.probed.clear()
        await asyncio.sleep(5)
        assert web.inner_ways == {}


async def test_port_without_an_exempt_user_counts_before_rules_with_one() -> None:
    async with watched() as node:
        node.rules[ONE] = CONSUL
        node.probed[ONE] = OF_NO_USER
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        assert web.inner_ways == {ONE: OF_NO_USER}
        node.probed[ONE] = InnerWay(OF_NO_USER.redirection, 1337)
        await asyncio.sleep(5)
        assert web.inner_ways == {ONE: CONSUL}


async def test_what_the_relay_finds_inside_is_logged_and_what_it_cannot_pass_is_a_warning() -> None:
    ways = {
        "198.18.1.1": (CONSUL, Mode.STRICT),
        "198.18.1.2": (OF_NO_USER, Mode.STRICT),
        "198.18.1.3": (OF_NO_USER, Mode.ENFORCE),
        "198.18.1.4": (InnerWay(Dropped(8080), None), Mode.STRICT),
    }
    with structlog.testing.capture_logs() as lines:
        async with watched() as node:
            node.rules = {address: way for address, (way, _) in ways.items()}
            for address, (_, mode) in ways.items():
                node.add(strict_pod(f"web{address[-1]}", address, mode=mode))
            await asyncio.sleep(1)
    assert [(line["event"], line["log_level"], line["pod"], line["port"]) for line in lines] == [
        (Event.POD_REDIRECTED, "info", "shop/web1", 15001),
        (Event.POD_REDIRECTED, "warning", "shop/web2", 15001),
        (Event.POD_REDIRECTED, "info", "shop/web3", 15001),
        (Event.POD_DROPS_INSIDE, "warning", "shop/web4", 8080),
    ]
    named = [(line["address"], line["mesh"], line["exempt_user"]) for line in lines[:2]]
    assert named == [("198.18.1.1", "Consul", 5995), ("198.18.1.2", "Istio", None)]


async def test_other_work_of_the_loop_comes_between_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 2 ms here."""
    clock = SimpleNamespace(monotonic=functools.partial(next, itertools.count(0, 0.002)))
    monkeypatch.setattr(inner_ways, "time", clock)
    order: list[str] = []

    async def work() -> None:
        while True:
            order.append("work")
            await asyncio.sleep(0)

    async with watched() as node:
        node.tried = order
        working = asyncio.create_task(work())
        for number in range(3):
            node.add(strict_pod(f"web{number}", f"198.18.1.{number}"))
        for _ in range(20):
            await asyncio.sleep(0)
        working.cancel()
    first, second, third = (order.index(f"198.18.1.{number}") for number in range(3))
    assert "work" in order[first:second]
    assert "work" in order[second:third]


async def test_unchanged_pod_marks_nothing() -> None:
    async with watched() as node:
        node.rules[ONE] = CONSUL
        node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        node.changes.take()
        await asyncio.sleep(20)
        assert node.changes.take() == []


async def test_pods_without_the_relay_are_tried_less_often() -> None:
    """Their proxy gets a connection each time."""
    async with watched() as node:
        node.rules = {ONE: CONSUL}
        web = node.add(strict_pod("web", ONE, mode=Mode.ENFORCE))
        await asyncio.sleep(29)
        assert node.tried == [ONE]
        assert web.inner_ways == {ONE: CONSUL}
        await asyncio.sleep(30)
        assert node.tried == [ONE, ONE]
        node.needs.add("web")
        await asyncio.sleep(10)
        assert node.tried == [ONE] * 4


@pytest.mark.parametrize("field", ["is_relayed", "host_network"])
async def test_pod_that_never_has_the_relay_is_tried_less_often(field: str) -> None:
    async with watched() as node:
        node.needs.add("web")
        web = strict_pod("web", ONE)
        web.pod = msgspec.structs.replace(web.pod, **{field: field == "host_network"})
        node.add(web)
        await asyncio.sleep(29)
        assert node.tried == [ONE]


async def test_pod_that_gets_strict_is_tried_at_once() -> None:
    async with watched() as node:
        web = node.add(strict_pod("web", ONE, mode=Mode.ENFORCE))
        await asyncio.sleep(1)
        node.rules[ONE] = CONSUL
        web.pod = msgspec.structs.replace(web.pod, mode=Mode.STRICT)
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(0.01)
        assert web.inner_ways == {ONE: CONSUL}


async def test_pod_that_gets_mode_off_has_no_ways_and_is_tried_as_a_new_one_later() -> None:
    async with watched() as node:
        node.rules[ONE] = CONSUL
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        strict = web.pod
        web.pod = msgspec.structs.replace(strict, mode=Mode.OFF)
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(0.01)
        assert node.ways(web) is None
        web.pod = strict
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(0.01)
        assert web.inner_ways == {ONE: CONSUL}
        assert node.before == [{}, {}]


async def test_pod_without_a_namespace_is_not_tried() -> None:
    async with watched() as node:
        web = strict_pod("web", ONE)
        web.netns = None
        node.add(web)
        await asyncio.sleep(40)
        assert node.tried == []


async def test_pod_that_comes_back_is_tried_at_once() -> None:
    async with watched() as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(0.01)
        del node.store.pods["uid-web"]
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(0.01)
        assert node.tried == [ONE]
        node.add(web)
        await asyncio.sleep(0.01)
        assert node.tried == [ONE] * 2


async def test_pods_in_mode_off_are_not_tried() -> None:
    async with watched() as node:
        node.add(strict_pod("off", ONE, mode=Mode.OFF))
        await asyncio.sleep(100)
        assert node.tried == []


async def test_pod_that_ends_keeps_what_it_had_and_stops_no_other() -> None:
    async with watched() as node:
        node.rules = {ONE: CONSUL, OTHER: CONSUL}
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(1)
        node.gone.add("/run/netns/web")
        late = node.add(strict_pod("late", OTHER))
        await asyncio.sleep(5)
        assert web.inner_ways == {ONE: CONSUL}
        assert late.inner_ways == {OTHER: CONSUL}


async def test_pod_without_hooks_is_tried_only_every_few_minutes() -> None:
    async with watched(can_compare=True) as node:
        node.add(strict_pod("web", ONE))
        await asyncio.sleep(60)
        tried = len(node.tried)
        assert tried < 10  # until the kernel compares it
        await asyncio.sleep(230)
        assert len(node.tried) == tried
        await asyncio.sleep(300)
        assert len(node.tried) == tried + 1


async def test_pod_that_gets_rules_is_tried_at_once_and_every_few_seconds_from_then_on() -> None:
    async with watched(can_compare=True) as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(60)
        assert node.hookless is not None
        assert "uid-web" in node.hookless
        node.rules[ONE] = CONSUL
        node.hookless.hook("uid-web")
        await asyncio.sleep(0.01)
        assert web.inner_ways == {ONE: CONSUL}
        node.rules[ONE] = OF_NO_USER
        await asyncio.sleep(5)
        assert web.inner_ways == {ONE: OF_NO_USER}


async def test_what_a_probe_has_found_counts_whatever_the_kernel_compares() -> None:
    async with watched(can_compare=True) as node:
        web = node.add(strict_pod("web", ONE))
        await asyncio.sleep(60)
        node.probed[ONE] = OF_NO_USER
        await asyncio.sleep(5)
        assert web.inner_ways == {ONE: OF_NO_USER}
        node.probed.clear()
        await asyncio.sleep(5)
        assert web.inner_ways == {}


async def test_ended_pods_are_not_compared_and_nothing_is_after_the_end() -> None:
    async with watched(can_compare=True) as node:
        node.add(strict_pod("web", ONE))
        await asyncio.sleep(60)
        assert node.hookless is not None
        assert "uid-web" in node.hookless
        del node.store.pods["uid-web"]
        node.store.in_force.mark("uid-web")
        await asyncio.sleep(0.01)
        assert "uid-web" not in node.hookless
    assert node.hookless.is_closed
