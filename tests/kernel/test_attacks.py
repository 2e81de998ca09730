"""Each attack of tests/attacks/kit.py on a node with an agent: it reaches a pod before the agent
gates it, and not afterwards.

PODGATE_TEST_ATTACKS=all (`make test-attacks`) takes each topology in each mode; otherwise each
topology has one of the modes. PODGATE_TEST_TRICKS is a pattern of those that are tried.
"""

import contextlib
import fnmatch
import itertools
import os
from collections.abc import Mapping

import pytest

from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, are_all_isolated
from agent.logs import Event
from agent.pods import isolation
from bpf.gates import Gates
from bpf.verdicts import Mode, Verdict
from tests.attacks import kit
from tests.attacks.kit import Cell
from tests.attacks.site import NOT_OFFERED, Site
from tests.attacks.topologies import Topology
from tests.attacks.trick import Attack
from tests.attacks.tricks import grouping
from tests.kernel import conversations, enforcing, offers, traffic
from tests.nodes.worker import Worker

pytestmark = pytest.mark.kernel

_LABS = kit.LABS if os.environ.get("PODGATE_TEST_ATTACKS") == "all" else kit.DIAGONAL
_TRICKS = os.environ.get("PODGATE_TEST_TRICKS", "*")
_REASONS = {Mode.ENFORCE: isolation.ENFORCED, Mode.STRICT: isolation.STRICT}


def _id(value: object) -> str:
    return value.label if isinstance(value, Mode) else str(value)


@pytest.mark.parametrize(("topology", "mode"), _LABS, ids=_id)
def test_no_attack_reaches_a_pod(
    lab: labs.Lab, operator: AgentProcess, worker: Worker, topology: Topology, mode: Mode
) -> None:
    """The control comes first, without podgate: each attack works, and what the table leaves out
    does not. Then each is dropped or rejected, and counted, but for known bypasses."""
    offers.need_netns_cookie()
    wanted = [cell for cell in kit.cells(topology) if fnmatch.fnmatch(str(cell), _TRICKS)]
    with topology.make(lab) as site:
        found = {cell: reaches(site, cell) for cell in wanted}
        works = [cell for cell in wanted if found[cell]]
        expect_none(
            [f"does not work without podgate: {cell}" for cell in wanted if fails(cell, found)],
            [f"works, though the table says why not: {cell}" for cell in works if cell.is_left_out],
        )

        start(operator, site, mode)
        with contextlib.closing(Drops(worker)) as drops:
            after = {cell: (reaches(site, cell), drops.have_grown()) for cell in works}
        passed = {cell for cell in works if after[cell][0]}
        known = {cell for cell in works if cell.is_bypass}
        expect_none(
            [f"reaches the pod: {cell}" for cell in works if cell in passed - known],
            [f"is no bypass any more: {cell}" for cell in works if cell in known - passed],
            [f"vanishes, uncounted: {cell}" for cell in works if after[cell] == (False, False)],
        )
        expect_honest_traffic(site)


def fails(cell: Cell, found: Mapping[Cell, bool | None]) -> bool:
    return found[cell] is False and not cell.is_left_out


def expect_none(*problems: list[str]) -> None:
    lines = list(itertools.chain(*problems))
    assert not lines, "\n".join(lines)


def reaches(site: Site, cell: Cell) -> bool | None:
    """Whether the attack reaches the pod; None where the kernel has no such sockets."""
    site.arrived()
    site.next_port()
    way = next((way for way in site.ways if way.name == cell.way), None)
    attack = Attack(site, cell.version, cell.trick.rights[cell.version], way)
    try:
        shows = cell.trick.attempt(attack)
    except OSError as error:
        if error.errno in NOT_OFFERED:
            return None
        error.add_note(f"{cell} raised it")
        raise
    except Exception as error:
        error.add_note(f"{cell} raised it")
        raise
    return shows if isinstance(shows, bool) else any(map(shows, site.arrived()))


def start(operator: AgentProcess, site: Site, mode: Mode) -> None:
    """An agent; returns once both pods are gated, and pass only what is an answer."""
    for pod in (site.pod, site.neighbour):
        operator.write_manifest(pod, mode=mode.label, container={})
    for pod in site.others:
        operator.write_manifest(pod, mode=Mode.OFF.label, container={})
    operator.start(*enforcing.RELAY_RANGES)
    names = (site.pod.name, site.neighbour.name)
    reason = _REASONS[mode]
    operator.wait_for(
        "the gates", lambda report: are_all_isolated(report, names=names, reason=reason)
    )
    operator.event(Event.REPLY_TABLE_READY, pod=f"demo/{site.pod.name}")


class Drops:
    """What all gates and hooks of the node have dropped or rejected since the last question."""

    def __init__(self, worker: Worker) -> None:
        installed = worker.installed()
        self._gates = Gates(installed.loaded, installed.pins)
        self._before = self._sum()

    def close(self) -> None:
        self._gates.close()

    def have_grown(self) -> bool:
        before, self._before = self._before, self._sum()
        return self._before > before

    def _sum(self) -> int:
        all_counts = [self._gates.host_counts(), *self._gates.counts().values()]
        return sum(
            count
            for counts in all_counts
            for (verdict, _), count in counts.items()
            if verdict is Verdict.DROP
        )


def expect_honest_traffic(site: Site) -> None:
    """Pods talk to each other, and to the node, which routes their datagrams to groups."""
    for version in (4, 6):
        with conversations.served_by(site.pod.open_socket) as serving:
            address = traffic.address(site.pod, version)
            conversations.exchange_all(site.neighbour, serving, address)
        with traffic.listen_on_node(8080) as server:
            node = traffic.gateway(site.pod, version)
            traffic.pod_connects(site.pod, node, version, server, size=1000)
        if not site.pod.is_bridged:
            assert grouping.is_routed_between_pods(site, version)
