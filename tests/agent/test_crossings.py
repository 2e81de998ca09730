"""What the node's interfaces tell of ways round a gate."""

from collections.abc import Callable
from typing import Any

import pytest

from agent.crossings import Crossings, find_bridges
from agent.tunnels import Tunnels, find_tunnels
from bpf.errors import AttachError

UP = 1


class Link(dict[Any, Any]):
    """A link as pyroute2 gives it, as far as it is asked."""

    def __init__(
        self,
        index: int,
        *,
        kind: str | None = None,
        master: int | None = None,
        flags: int = UP,
        data: dict[str, int] | None = None,
    ) -> None:
        info = (
            None if kind is None else _Attributes({"IFLA_INFO_KIND": kind, "IFLA_INFO_DATA": data})
        )
        super().__init__(
            {"index": index, "flags": flags, "master": master, ("linkinfo", "kind"): kind}
        )
        self._info = info

    def get_attr(self, name: str) -> Any:
        return self._info if name == "IFLA_LINKINFO" else None


class _Attributes:
    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def get_attr(self, name: str) -> Any:
        value = self._values.get(name)
        return _Attributes(value) if isinstance(value, dict) else value


class _Config:
    def __init__(self) -> None:
        self.switches: list[bool] = []

    def set_switch(self, *, is_there: bool) -> None:
        self.switches.append(is_there)


class _Keeper:
    """What `Crossings` asks of the gatekeeper."""

    def __init__(self) -> None:
        self.config = _Config()
        self.bridges: list[set[int]] = []
        self.are_all = True
        self.tunnels: list[tuple[frozenset[int], bool]] = []
        self.refuses = False

    async def keep_bridges(self, ifindexes: set[int], *, are_all: bool) -> None:
        if self.refuses:
            raise AttachError("guarding interface 5: no")
        self.are_all = are_all
        self.bridges.append(ifindexes)

    async def keep_tunnels(self, udp_ports: frozenset[int], *, are_guarded: bool) -> None:
        self.tunnels.append((udp_ports, are_guarded))


def make(
    keeper: _Keeper, gated: set[int], is_synced: Callable[[], bool] = lambda: True
) -> Crossings:
    return Crossings(
        keeper,  # type: ignore[arg-type]
        gated=lambda: gated,
        is_synced=is_synced,
    )


def test_a_tunnel_that_is_up_tells_its_port() -> None:
    links = [
        Link(2, kind="vxlan", data={"IFLA_VXLAN_PORT": 8472}),
        Link(3, kind="geneve", data={"IFLA_GENEVE_PORT": 6081}),
        Link(4, kind="vxlan", data={"IFLA_VXLAN_PORT": 4789}, flags=0),
        Link(5, kind="veth"),
        Link(6),
    ]
    assert find_tunnels(links) == Tunnels(frozenset({8472, 6081}), any=True)


@pytest.mark.parametrize("kind", ["ipip", "gre", "sit", "ip6tnl"])
def test_a_tunnel_without_ports_is_one_too(kind: str) -> None:
    assert find_tunnels([Link(2, kind=kind)]) == Tunnels(frozenset(), any=True)
    assert find_tunnels([Link(2, kind=kind, flags=0)]) == Tunnels(frozenset(), any=False)


def test_only_bridges_of_gated_interfaces_count() -> None:
    links = [
        Link(2, kind="bridge"),
        Link(3, kind="bridge"),
        Link(4, kind="vrf"),
        Link(5, kind="veth", master=2),
        Link(6, kind="veth", master=3),
        Link(7, kind="veth", master=4),
    ]
    assert find_bridges(links, {5, 7}) == {2}


async def test_the_kernel_is_told_of_changes_only() -> None:
    keeper = _Keeper()
    gated = {5}
    crossings = make(keeper, gated)
    links = [Link(2, kind="bridge"), Link(5, kind="veth", master=2)]
    await crossings.keep(links)
    await crossings.keep(links)
    assert keeper.bridges == [{2}]
    assert keeper.tunnels == [(frozenset(), False)]
    gated.clear()
    await crossings.keep([*links, Link(9, kind="vxlan", data={"IFLA_VXLAN_PORT": 8472})])
    assert keeper.bridges == [{2}, set()]
    assert keeper.tunnels[1:] == [(frozenset({8472}), True)]


async def test_no_bridge_is_let_go_before_every_pod_has_been_seen() -> None:
    """Those of an earlier run are still judged by what it left."""
    keeper = _Keeper()
    is_synced = False
    crossings = make(keeper, {5}, lambda: is_synced)
    links = [Link(2, kind="bridge"), Link(5, kind="veth", master=2)]
    await crossings.keep(links)
    assert (keeper.bridges, keeper.are_all) == ([{2}], False)
    is_synced = True
    await crossings.keep(links)
    assert (keeper.bridges, keeper.are_all) == ([{2}, {2}], True)


async def test_what_is_refused_is_tried_again() -> None:
    keeper = _Keeper()
    crossings = make(keeper, {5})
    links = [Link(2, kind="bridge"), Link(5, kind="veth", master=2)]
    keeper.refuses = True
    await crossings.keep(links)
    keeper.refuses = False
    await crossings.keep(links)
    assert keeper.bridges == [{2}]


async def test_a_switch_is_told_when_it_comes_and_goes() -> None:
    keeper = _Keeper()
    crossings = make(keeper, set())
    for links in ([], [], [Link(3, kind="openvswitch")], [Link(3, kind="openvswitch")], []):
        await crossings.keep(list(links))
    assert keeper.config.switches == [False, True, False]
