"""The default-deny table after a kill or a flush, without nft, and under bursts of changes."""

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from agent.default_deny import ruleset
from agent.default_deny.table import DefaultDenyError
from agent.lab import lab as labs
from agent.linux import nft
from agent.linux.nft_cgroups import CgroupMatches
from tests.kernel import cgroups, traffic
from tests.kernel.default_deny import (
    OURS,
    Driven,
    OpenTable,
    default_deny,
    elements,
    flush_ruleset,
    open_table,
    record_scripts,
    remove_without_agent,
    tables,
)

pytestmark = pytest.mark.kernel

__all__ = ["default_deny", "open_table"]


def test_remove_leaves_no_table(lab: labs.Lab, default_deny: Driven) -> None:
    assert tables() == OURS
    default_deny.remove()
    assert tables() == []
    assert not default_deny.available
    default_deny.gate([1])
    remove_without_agent()
    assert tables() == []


def test_each_transaction_and_nothing_else_changes_the_generation(
    lab: labs.Lab, default_deny: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the table is listed only after transactions of other programs."""

    async def generation() -> int:
        found = await nft.generation()
        assert found is not None
        return found

    async def transactions(script: str, *, only_check: bool = False) -> int:
        before = await generation()
        with contextlib.suppress(nft.NftError):
            await nft.apply(script, only_check=only_check)
        return await generation() - before

    table = "add table inet other\nadd chain inet other one\n"
    rejected = "add rule inet other one accept\nadd rule inet other one jump missing\n"
    run = asyncio.run
    assert run(transactions(table)) == 1
    assert run(transactions(table, only_check=True)) == 0
    assert run(transactions(rejected)) == 0
    assert run(transactions("")) == 0
    assert run(transactions("delete table inet other\n")) == 1
    before = run(generation())
    assert not default_deny.ensure()
    default_deny.beat()
    default_deny.gate([1])
    assert run(generation()) == before + 2
    listed: list[str] = []

    async def query(*arguments: str) -> str:
        listed.extend(arguments)
        return ""

    with monkeypatch.context() as replaced:
        replaced.setattr(nft, "query", query)
        assert not default_deny.ensure()
    assert listed == []


_MAKER = """
import asyncio, sys
from agent.default_deny.table import DefaultDenyTable
async def main():
    opened = await DefaultDenyTable.open()
    assert opened.available, opened.reason_unavailable
    print("open", flush=True)
    await opened.gate([int(await asyncio.to_thread(sys.stdin.readline))])
    print("gated", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""


def test_table_outlives_its_killed_process_and_the_next_one_adopts_it(
    lab: labs.Lab, open_table: OpenTable
) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", _MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"open\n"
        gated = lab.add_pod("gated", 1)
        maker.stdin.write(b"%d\n" % gated.ifindex)
        maker.stdin.flush()
        assert maker.stdout.readline() == b"gated\n"
        maker.send_signal(signal.SIGKILL)
    born_after = lab.add_pod("after", 2)
    with gated.listen(80), born_after.listen(80):
        assert traffic.node_is_dropped(born_after, 4)
        opened = open_table()
        assert tables() == OURS
        assert traffic.node_is_dropped(born_after, 4)
        assert traffic.node_reaches(gated, 4)
        opened.gate([born_after.ifindex])
        assert traffic.node_reaches(born_after, 4)


def test_cgroup_of_pods_that_ends_while_the_table_is_installed_is_left_out(
    open_table: OpenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_pods = CgroupMatches.of_pods
    with cgroups.cgroup(below=cgroups.root()) as outer:
        inner = outer.directory / "kubepods"
        inner.mkdir()

        def read_then_end(matches: CgroupMatches) -> tuple[str, ...]:
            found = of_pods(matches)
            if inner.is_dir():
                assert any(outer.directory.name in one for one in found)
                inner.rmdir()
            return found

        monkeypatch.setattr(CgroupMatches, "of_pods", read_then_end)
        opened = open_table(pods=None)
        assert not inner.is_dir()
        assert opened.reason_unavailable == ""
        assert tables() == OURS


def test_table_is_restored_after_a_flush_of_all_rules(lab: labs.Lab, default_deny: Driven) -> None:
    pod, other = lab.add_pod("web", 1), lab.add_pod("other", 2)
    default_deny.gate([pod.ifindex])
    assert not default_deny.ensure()
    flush_ruleset()
    assert default_deny.ensure()
    with pod.listen(80), other.listen(80):
        assert traffic.node_reaches(pod, 4)
        assert traffic.node_is_dropped(other, 4)
    flush_ruleset()
    default_deny.gate([other.ifindex])  # does not wait for the next poll
    assert tables() == OURS


def test_outdated_tables_of_a_firewall_file_are_replaced(
    lab: labs.Lab, default_deny: Driven
) -> None:
    """As where /etc/nftables.conf is what `nft list ruleset` printed while podgate ran. A pod that
    was gated since would stay blocked from all host processes but the kubelet."""
    command = ["nft", "list", "ruleset"]
    copy = subprocess.run(command, check=True, capture_output=True).stdout
    pod = lab.add_pod("web", 1)
    default_deny.gate([pod.ifindex])
    with pod.listen(80):
        flush_ruleset()
        subprocess.run(["nft", "-f", "-"], check=True, input=copy)
        assert traffic.node_is_dropped(pod, 4)
        assert default_deny.ensure()
        assert traffic.node_reaches(pod, 4)


def test_removed_rule_is_restored(default_deny: Driven) -> None:
    subprocess.run(["nft", "flush", "chain", "inet", "podgate", "postrouting"], check=True)
    assert default_deny.ensure()
    assert not default_deny.ensure()


def test_burst_of_changes_is_applied_in_few_transactions(
    default_deny: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = record_scripts(monkeypatch)
    default_deny.all_at_once(*(default_deny.made.gate([1000 + number]) for number in range(200)))
    assert len(scripts) <= 2
    assert elements(ruleset.GATED) == set(range(1000, 1200))


def test_last_of_contradicting_changes_in_a_burst_applies(default_deny: Driven) -> None:
    made = default_deny.made
    default_deny.all_at_once(
        made.gate([1000, 1001]),
        made.exempt([1000]),
        made.release([1001]),
        made.gate([1001]),
        made.release([1000]),
    )
    assert elements(ruleset.GATED) == {1001}
    assert 1000 not in elements(ruleset.NOT_PODS)


def test_interface_whose_name_is_a_number_is_not_mistaken_for_another(
    lab: labs.Lab, default_deny: Driven
) -> None:
    pod = lab.add_pod("web", 1)
    names = ["ip", "link", "add", str(pod.ifindex), "type", "veth", "peer", "name", "pgpeer"]
    subprocess.run(names, check=True)
    try:
        default_deny.gate([pod.ifindex])
        with pod.listen(80):
            assert traffic.node_reaches(pod, 4)
    finally:
        subprocess.run(["ip", "link", "del", "pgpeer"], check=True)


def test_missing_nft_is_reported_in_one_sentence_and_changes_nothing(
    lab: labs.Lab,
    open_table: OpenTable,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    opened = open_table()
    assert not opened.available
    assert opened.reason_unavailable == (
        "Without the default-deny table the host reaches a new pod until its gate is attached: "
        "there is no nft command."
    )
    opened.gate([1])
    opened.admit("/x")
    assert not opened.ensure()
    opened.remove()
    remove_without_agent()


def test_nft_error_of_the_kernel_is_reported_in_one_sentence(
    lab: labs.Lab,
    open_table: OpenTable,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    fake = tmp_path / "nft"
    fake.write_text("#!/bin/sh\necho 'x:0:0-0: Error: Operation not supported' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    opened = open_table()
    assert opened.reason_unavailable.endswith("Operation not supported.")
    monkeypatch.undo()
    assert tables() == []


def test_kernel_without_bridge_filtering_blocks_routed_pods_only(
    lab: labs.Lab, open_table: OpenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = nft.apply

    async def without_bridges(script: str, *, only_check: bool = False) -> None:
        if "table bridge podgate {" in script:
            raise nft.NftError("Could not process rule: Operation not supported")
        await apply(script, only_check=only_check)

    monkeypatch.setattr(nft, "apply", without_bridges)
    opened = open_table()
    assert opened.available
    assert not opened.covers_bridges
    pod, bridged = lab.add_pod("web", 1), lab.add_pod("bridged", 2, bridged=True)
    with pod.listen(80), bridged.listen(80):
        assert traffic.node_is_dropped(pod, 4)
        assert traffic.node_reaches(bridged, 4)
        opened.gate([pod.ifindex])
        assert traffic.node_reaches(pod, 4)


def test_hanging_nft_is_killed(
    default_deny: Driven, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fake = tmp_path / "nft"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        patched.setattr(nft, "_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(DefaultDenyError, match="did not answer in time"):
            default_deny.gate([1000])
    default_deny.gate([1001])
    assert elements(ruleset.GATED) == {1000, 1001}
