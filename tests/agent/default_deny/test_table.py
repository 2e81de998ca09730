"""The default-deny table: its sets of interfaces, and nftables that fail or are changed."""

import asyncio
import pathlib

import pytest
import structlog

from agent.default_deny.table import DefaultDenyError, DefaultDenyTable
from agent.linux import nft
from agent.logs import Event
from tests.agent.default_deny.nftables import Nftables, nftables

__all__ = ["nftables"]

BUSY = nft.NftError("Could not process rule: Device or resource busy")


@pytest.fixture
def cgroup2(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "kubelet").mkdir()
    (tmp_path / "kubepods").mkdir()
    return tmp_path


async def opened(cgroup2: pathlib.Path, *gated: int) -> DefaultDenyTable:
    table = await DefaultDenyTable.open(gated=gated, cgroup2=cgroup2)
    assert table.available
    return table


async def test_first_run_leaves_existing_interfaces_open(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    await opened(cgroup2, 7)
    assert nftables.sets == {"gated": {7}, "not_pods": {1, 2, 8}}
    assert nftables.families == {"inet", "bridge"}


async def test_later_run_keeps_interfaces_blocked_that_came_without_an_agent(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    await opened(cgroup2, 7)
    nftables.interfaces[9] = "veth9"
    del nftables.interfaces[8]
    await opened(cgroup2)
    assert nftables.sets == {"gated": {7}, "not_pods": {1, 2}}


async def test_interfaces_move_between_the_sets(nftables: Nftables, cgroup2: pathlib.Path) -> None:
    table = await opened(cgroup2)
    await table.gate([8])
    assert nftables.sets == {"gated": {8}, "not_pods": {1, 2, 7}}
    await table.exempt([8])
    assert nftables.sets == {"gated": set(), "not_pods": {1, 2, 7, 8}}
    await table.release([8])
    assert nftables.sets == {"gated": set(), "not_pods": {1, 2, 7}}


async def test_change_without_effect_writes_nothing(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2, 7)
    nftables.scripts.clear()
    await table.gate([7])
    await table.exempt([1])
    await table.release([9])
    assert nftables.scripts == []


async def test_burst_of_gates_is_few_transactions(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2)
    nftables.scripts.clear()
    await asyncio.gather(*(table.gate([number]) for number in range(100, 350)))
    assert len(nftables.scripts) <= 2
    assert nftables.sets["gated"] == set(range(100, 350))


async def test_rejected_change_installs_the_whole_table(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    """Another program removed the table in between."""
    table = await opened(cgroup2)
    nftables.flush()
    await table.gate([7])
    assert nftables.families == {"inet", "bridge"}
    assert nftables.sets == {"gated": {7}, "not_pods": {1, 2, 8}}


async def test_failed_change_is_an_error_and_is_written_by_the_next_one(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2)
    nftables.failures = [BUSY, BUSY]
    with pytest.raises(DefaultDenyError, match="Device or resource busy"):
        await table.gate([7])
    assert nftables.sets["gated"] == set()
    await table.gate([8])
    assert nftables.sets == {"gated": {7, 8}, "not_pods": {1, 2}}


async def test_removed_table_is_restored_and_an_unchanged_one_is_not_written(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2, 7)
    nftables.scripts.clear()
    assert not await table.ensure()
    assert nftables.scripts == []
    nftables.flush()
    with structlog.testing.capture_logs() as logs:
        assert await table.ensure()
    assert [line["event"] for line in logs] == [Event.DEFAULT_DENY_TABLE_RESTORED]
    assert nftables.sets == {"gated": {7}, "not_pods": {1, 2, 8}}


async def test_outdated_sets_are_replaced(nftables: Nftables, cgroup2: pathlib.Path) -> None:
    """A firewall that loads what `nft list ruleset` once printed brings an older copy back."""
    table = await opened(cgroup2, 7)
    older = {name: set(members) for name, members in nftables.sets.items()}
    await table.gate([8])
    nftables.sets = older
    nftables.change()
    assert await table.ensure()
    assert nftables.sets == {"gated": {7, 8}, "not_pods": {1, 2}}
    assert not await table.ensure()


async def test_nothing_is_listed_while_no_other_program_changes_nftables(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2, 7)
    assert not await table.ensure()
    nftables.queries.clear()
    await table.beat()
    await table.gate([8])
    assert not await table.ensure()
    assert nftables.queries == []
    nftables.change()
    assert not await table.ensure()
    assert nftables.queries != []


async def test_change_beside_an_own_one_is_not_missed(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2, 7)
    assert not await table.ensure()
    await table.beat()
    nftables.sets["gated"].add(8)
    nftables.change()
    await table.beat()
    assert await table.ensure()
    assert nftables.sets["gated"] == {7}


async def test_sets_are_listed_again_after_a_check_beside_a_pending_change(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2, 7)
    nftables.sets["gated"].add(8)
    nftables.change()
    _, ensured, _ = await asyncio.gather(table.beat(), table.ensure(), table.gate([2]))
    assert not ensured
    assert await table.ensure()
    assert nftables.sets["gated"] == {2, 7}


async def test_change_that_timed_out_is_written_though_the_ruleset_is_the_same(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2, 7)
    assert not await table.ensure()
    nftables.failures = [TimeoutError()]
    with pytest.raises(DefaultDenyError):
        await table.gate([8])
    assert await table.ensure()
    assert nftables.sets["gated"] == {7, 8}


async def test_without_a_generation_each_check_lists(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    nftables.generation = None
    table = await opened(cgroup2, 7)
    assert not await table.ensure()
    nftables.queries.clear()
    assert not await table.ensure()
    assert nftables.queries != []


async def test_interface_that_is_gone_is_no_difference(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2, 7)
    del nftables.interfaces[7]
    assert not await table.ensure()


async def test_kubelet_is_admitted_by_its_cgroup(nftables: Nftables, cgroup2: pathlib.Path) -> None:
    table = await opened(cgroup2)
    await table.admit("/kubelet")
    assert "level 1" in nftables.kubelet
    assert nftables.kubelet.endswith('kubelet" accept')
    with pytest.raises(DefaultDenyError, match="does not exist"):
        await table.admit("/gone")
    assert nftables.kubelet.endswith('kubelet" accept')


async def test_unknown_kubelet_admits_processes_outside_of_pods_until_it_is_found(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await opened(cgroup2)
    assert nftables.kubelet == ""
    await table.admit(None)
    assert nftables.kubelet == "jump orphaned"
    await table.admit("/kubelet")
    assert nftables.kubelet.endswith('kubelet" accept')
    assert "orphaned" not in nftables.kubelet


async def test_kubelet_that_cannot_be_admitted_leaves_the_previous_one(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    (cgroup2 / "kubelet2").mkdir()
    table = await opened(cgroup2)
    await table.admit("/kubelet")
    nftables.failures = [BUSY, BUSY]
    with pytest.raises(DefaultDenyError):
        await table.admit("/kubelet2")
    await table.gate([7])  # written as a whole, with the kubelet that is admitted
    assert 'kubelet" accept' in nftables.scripts[-1]
    assert "kubelet2" not in nftables.scripts[-1]


async def test_kernel_without_bridge_filters_has_the_inet_table(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    nftables.lacks_bridge = True
    table = await opened(cgroup2)
    assert not table.covers_bridges
    await table.gate([7])
    assert nftables.families == {"inet"}
    assert "bridge" not in nftables.scripts[-1]


async def test_node_without_nft_has_a_reason_and_every_call_does_nothing(
    nftables: Nftables, cgroup2: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(*arguments: str, only_check: bool = False) -> str:
        raise nft.NftMissingError("there is no nft command")

    monkeypatch.setattr(nft, "apply", missing)
    monkeypatch.setattr(nft, "query", missing)
    table = await DefaultDenyTable.open(cgroup2=cgroup2)
    assert "there is no nft command" in table.reason_unavailable
    await table.gate([7])
    await table.admit("/kubelet")
    await table.beat()
    assert not await table.ensure()
    await table.remove()


async def test_removal_leaves_no_table(nftables: Nftables, cgroup2: pathlib.Path) -> None:
    table = await opened(cgroup2)
    await table.remove()
    assert nftables.families == set()
    nftables.scripts.clear()
    await table.gate([7])
    assert nftables.scripts == []
