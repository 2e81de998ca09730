"""The default-deny table: its sets of interfaces, and nftables that fail or are changed."""

import asyncio
import pathlib
from collections.abc import Awaitable, Callable

import pytest
import structlog

from agent.default_deny import installed
from agent.default_deny import table as default_deny_table
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
    table = await opened(cgroup2, 7)
    assert nftables.sets == {"gated": {7}, "not_pods": {1, 2, 8}}
    assert nftables.families == {"inet", "bridge"}
    assert len(nftables.scripts) == 1
    assert (table.covers_bridges, table.covers_datagrams) == (True, True)
    assert len(table.chains) == 5


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


@pytest.mark.parametrize(
    ("change", "gated", "not_pods"),
    [
        (lambda table: table.gate([2]), {2, 7}, {1, 8}),
        (lambda table: table.gate([9]), {7, 9}, {1, 2, 8}),
        (lambda table: table.release([2]), {7}, {1, 8}),
    ],
    ids=["moved", "added", "removed"],
)
async def test_sets_are_listed_again_after_a_check_beside_a_pending_change(
    nftables: Nftables,
    cgroup2: pathlib.Path,
    change: Callable[[DefaultDenyTable], Awaitable[None]],
    gated: set[int],
    not_pods: set[int],
) -> None:
    table = await opened(cgroup2, 7)
    nftables.sets["gated"].add(8)
    nftables.change()
    _, ensured, _ = await asyncio.gather(table.beat(), table.ensure(), change(table))
    assert not ensured
    assert await table.ensure()
    assert nftables.sets == {"gated": gated, "not_pods": not_pods}


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


async def test_other_protocols_are_covered_once_connections_are_tracked(
    nftables: Nftables, cgroup2: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "tracks_connections", lambda: False)
    table = await opened(cgroup2)

    def covered() -> tuple[bool, bool]:
        return table.covers_datagrams, "ct state" in nftables.scripts[-1]

    assert not await table.ensure()
    assert covered() == (False, False)
    monkeypatch.setattr(installed, "tracks_connections", lambda: True)
    nftables.failures = [BUSY, BUSY]
    with pytest.raises(DefaultDenyError):
        await table.ensure()
    assert covered() == (False, False)
    await table.ensure()
    assert covered() == (True, True)
    count = len(nftables.scripts)
    assert not await table.ensure()
    assert len(nftables.scripts) == count


@pytest.mark.parametrize(
    ("error", "words"),
    [(TimeoutError(), "nft did not answer in time"), (nft.NftMissingError("no nft"), "no nft")],
)
async def test_tables_that_cannot_be_read_are_an_error(
    nftables: Nftables,
    cgroup2: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    words: str,
) -> None:
    async def fail(*arguments: str) -> str:
        raise error

    table = await opened(cgroup2)
    nftables.change()
    monkeypatch.setattr(nft, "query", fail)
    with pytest.raises(DefaultDenyError) as caught:
        await table.ensure()
    assert str(caught.value) == f"nftables cannot be read: {words}"


async def test_node_without_cgroups_has_a_reason(
    nftables: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_deny_table, "cgroup2_mount", lambda: None)
    table = await DefaultDenyTable.open()
    assert table.reason_unavailable == (
        "Without the default-deny table the host reaches a new pod until its gate is attached: "
        "without a cgroup v2 mount the kubelet cannot be identified."
    )
    found = (table.available, table.covers_bridges, table.covers_datagrams, table.chains)
    assert found == (False, False, False, [])
    assert nftables.scripts == []


@pytest.mark.parametrize(
    ("failure", "words"),
    [(BUSY, "Could not process rule: Device or resource busy"), (TimeoutError(), "")],
)
async def test_removal_that_fails_names_the_commands(
    nftables: Nftables, cgroup2: pathlib.Path, failure: Exception, words: str
) -> None:
    await opened(cgroup2)
    nftables.failures = [failure]
    with pytest.raises(DefaultDenyError) as caught:
        await default_deny_table.remove()
    assert str(caught.value) == (
        f"The default-deny table cannot be removed: {words or 'nft did not answer in time'}; try "
        "'nft delete table inet podgate' and the same with 'bridge'."
    )


async def test_there_is_nothing_to_remove_without_tables_or_nft(
    nftables: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    await default_deny_table.remove()
    assert nftables.scripts == []

    async def missing(*arguments: str) -> str:
        raise nft.NftMissingError("there is no nft command")

    monkeypatch.setattr(nft, "query", missing)
    await default_deny_table.remove()


async def test_kubelet_of_the_start_is_admitted_as_long_as_its_cgroup_exists(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await DefaultDenyTable.open(cgroup2=cgroup2, kubelet="/kubelet", pods=["/kubepods"])
    assert 'kubelet" accept' in nftables.scripts[-1]
    assert 'kubepods" return' in nftables.scripts[-1]
    (cgroup2 / "kubelet").rmdir()
    nftables.flush()
    assert await table.ensure()
    assert 'kubelet" accept' not in nftables.scripts[-1]
    assert 'kubepods" return' in nftables.scripts[-1]
    gone = await DefaultDenyTable.open(cgroup2=cgroup2, kubelet="/kubelet")
    assert gone.available


async def test_priority_of_the_kubelet_is_admitted_and_opens_later(
    nftables: Nftables, cgroup2: pathlib.Path
) -> None:
    table = await DefaultDenyTable.open(cgroup2=cgroup2, stale_seconds=5, abandoned_seconds=7)
    assert "timeout 5s" in nftables.scripts[-1]
    await table.admit("/kubelet", 0x10002)
    assert "meta priority 1:2" in nftables.scripts[-1]
    assert "timeout 7s" in nftables.scripts[-1]
    nftables.failures = [BUSY, BUSY]
    with pytest.raises(DefaultDenyError) as caught:
        await table.admit(None)
    assert str(caught.value) == (
        "The default-deny table keeps its content: Could not process rule: Device or resource busy."
    )
    await table.beat()
    assert "meta priority 1:2" in nftables.scripts[-1]
    assert "jump orphaned" not in nftables.scripts[-1].split("chain tag")[0]
    await table.admit("/kubelet")
    assert "timeout 5s" in nftables.scripts[-1]


@pytest.mark.parametrize(("ends", "is_available"), [(3, True), (4, False)])
async def test_tables_are_installed_though_cgroups_of_pods_end_meanwhile(
    nftables: Nftables,
    cgroup2: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: int,
    is_available: bool,
) -> None:
    """nft rejects a script that names a cgroup without a directory; up to three times."""
    pods = cgroup2 / "kubepods"
    applied = []

    async def apply(script: str, *, only_check: bool = False) -> None:
        if not only_check:
            applied.append('kubepods" return' in script)
            if len(applied) <= ends:
                await asyncio.to_thread(pods.rmdir if applied[-1] else pods.mkdir)
                raise nft.NftError("Could not process rule: No such file or directory")
        await nftables.apply(script, only_check=only_check)

    monkeypatch.setattr(nft, "apply", apply)
    table = await DefaultDenyTable.open(cgroup2=cgroup2)
    assert table.available is is_available
    assert applied == [True, False, True, False]
