"""podgate goes from several nodes, one of which is down at first. The last tests of a run."""

import pytest

from tests import polling
from tests.cluster.machine import Machine
from tests.cluster.plugin import Plugin
from tests.cluster.several_nodes import SeveralNodes
from tests.fleet import matrix
from tests.fleet.conftest import Agents, Site
from tests.fleet.test_modes import set_mode
from tests.fleet.workload import Fleet
from tests.image.node import BPFFS

pytestmark = pytest.mark.kernel


def _has_pins(machine: Machine) -> bool:
    return machine.path(BPFFS / "podgate").exists()


def test_uninstall_names_the_node_that_is_down_and_cleans_it_later(
    cluster: SeveralNodes, fleet: Fleet, podgate: Agents, last: Machine, plugin: Plugin
) -> None:
    set_mode(fleet, podgate, "strict")
    report = podgate[last.name].report()
    assert report is not None
    last.kubelet.stop()
    last.run("kill", "-KILL", str(report.pid))
    try:
        status, output = plugin.run("uninstall", "--yes", "--labels=keep", "--node-timeout=20")
        assert status == 1, output
        assert last.name in output
        assert _has_pins(last)
    finally:
        last.kubelet.start()
        last.kubelet.wait_until_ready()
    status, output = plugin.run("uninstall", "--yes", "--labels=keep")
    assert status == 0, output
    assert "podgate is removed." in output
    polling.wait_until("all pins are gone", lambda: not any(map(_has_pins, cluster.machines)))


def test_all_is_as_before_podgate(site: Site) -> None:
    fleet = site.fleet
    after = matrix.run(fleet.sources(), fleet.targets())
    assert matrix.differences(site.before, after) == []
    assert fleet.harm() == ""
