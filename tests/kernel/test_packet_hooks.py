"""A pod is hookless until rules or programs get into the way of its loopback, by whichever tool;
then the kernel reports it."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from agent.lab.lab import Lab
from agent.strict import hookless_pods
from agent.strict.hookless_pods import HooklessPods
from bpf import artefacts, errors, memory_watch, packet_hooks
from probes.netns import NetnsGoneError
from tests import polling
from tests.kernel import links, offers
from tests.kernel.test_prebuilt import open_descriptors, write_invalid

pytestmark = pytest.mark.kernel

HOOKED = {
    "iptables": "iptables-nft -t nat -A OUTPUT -p tcp -j REDIRECT --to-ports 15001",
    "ip6tables": "ip6tables-nft -A INPUT -p tcp -j DROP",
    "nft": "nft 'add table inet t; add chain inet t c { type filter hook output priority 0; }'",
    "nft before routing": (
        "nft 'add table ip t; add chain ip t c { type filter hook prerouting priority -300; }'"
    ),
    "nft after routing": (
        "nft 'add table ip6 t; add chain ip6 t c { type filter hook postrouting priority 0; }'"
    ),
    "nft on the loopback": (
        "nft 'add table netdev t;"
        " add chain netdev t c { type filter hook ingress device lo priority 0; }'"
    ),
    "tc on the loopback": "tc qdisc add dev lo clsact",
    "the loopback is down": "ip link set lo down",
}


class Node:
    """A pod and whether it is hookless."""

    def __init__(self, lab: Lab, pods: HooklessPods, hooked: list[set[str]]) -> None:
        self.lab = lab
        self.web = lab.add_pod("web", 1)
        self.pods = pods
        self.hooked = hooked

    def run(self, command: str) -> None:
        links.run_inside(self.web, command)

    def is_hookless(self) -> bool:
        self.pods.inspect("web", self.web.netns)
        self.pods.compare()
        return "web" in self.pods


@contextlib.asynccontextmanager
async def started(lab: Lab) -> AsyncIterator[Node]:
    offers.need_tcx()
    hooked: list[set[str]] = []
    with contextlib.closing(await hookless_pods.load(hooked.append)) as pods:
        yield Node(lab, pods, hooked)


@pytest.mark.parametrize("kind", HOOKED)
async def test_pod_is_hookless_until_something_is_hooked(lab: Lab, kind: str) -> None:
    async with started(lab) as node:
        assert node.is_hookless()
        node.run(HOOKED[kind])
        await polling.until("it is reported", lambda: node.hooked == [{"web"}])
        assert "web" not in node.pods
        assert not node.is_hookless()


async def test_pod_whose_rules_are_deleted_is_hookless_again(lab: Lab) -> None:
    async with started(lab) as node:
        node.run(HOOKED["iptables"])
        assert not node.is_hookless()
        node.run("nft flush ruleset")
        assert node.is_hookless()


async def test_only_the_pod_with_rules_is_reported(lab: Lab) -> None:
    async with started(lab) as node:
        node.pods.inspect("other", lab.add_pod("other", 2).netns)
        assert node.is_hookless()
        node.run(HOOKED["nft"])
        await polling.until("it is reported", lambda: node.hooked == [{"web"}])
        assert "other" in node.pods


async def test_pod_that_has_ended_stops_no_other(lab: Lab) -> None:
    async with started(lab) as node:
        other = lab.add_pod("other", 2)
        node.pods.inspect("other", other.netns)
        assert node.is_hookless()
        lab.remove_pod("other")
        with pytest.raises(NetnsGoneError):
            node.pods.inspect("other", other.netns)
        node.pods.forget("other")
        node.pods.compare()
        node.run(HOOKED["nft"])
        await polling.until("it is reported", lambda: {"web"} in node.hooked)


def test_nothing_is_left_open_without_a_clock(
    isolated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "_SYSCALL_NUMBERS", {})
    before = open_descriptors()
    with pytest.raises(errors.BpfError, match="no perf_event_open"):
        asyncio.run(hookless_pods.load(lambda _: None))
    assert open_descriptors() == before


def test_nothing_is_left_open_where_the_kernel_rejects_the_program(
    prebuilt_programs: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_invalid(packet_hooks.PROGRAM_SET, prebuilt_programs, tmp_path)
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    before = open_descriptors()
    with pytest.raises(errors.CompileError, match="R0 !read_ok"):
        asyncio.run(packet_hooks.load())
    assert open_descriptors() == before
