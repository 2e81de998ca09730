"""`kubectl podgate` while a node is down: its kubelet and its agent have ended."""

from collections.abc import Iterator

import pytest

from tests import polling
from tests.cluster.machine import Machine
from tests.cluster.plugin import Plugin
from tests.cluster.several_nodes import SeveralNodes
from tests.fleet import matrix
from tests.fleet.conftest import Agents, Site
from tests.fleet.test_modes import set_mode, until_in_mode
from tests.fleet.workload import SHOP, Fleet

pytestmark = pytest.mark.kernel


@pytest.fixture
def down(cluster: SeveralNodes, fleet: Fleet, podgate: Agents, last: Machine) -> Iterator[Machine]:
    """The last node in strict, and nothing of Kubernetes runs there but its containers."""
    set_mode(fleet, podgate, "strict")
    report = podgate[last.name].report()
    assert report is not None
    last.kubelet.stop()
    last.run("kill", "-KILL", str(report.pid))
    yield last
    last.kubelet.start()
    last.kubelet.wait_until_ready()
    for agent in podgate.values():
        agent.wait_until_ready()


def test_its_gates_stay_closed(site: Site, fleet: Fleet, down: Machine) -> None:
    after = matrix.run(fleet.sources(), fleet.targets())
    assert matrix.differences(site.before, after, closed=matrix.is_own) == []


@pytest.mark.parametrize("verb", ["status", "doctor", "drops"])
def test_reading_names_it_and_shows_the_others(
    cluster: SeveralNodes, down: Machine, plugin: Plugin, verb: str
) -> None:
    status, output = plugin.run(verb)
    assert status == 1, output
    assert down.name in output + plugin.errors
    if verb == "status":
        assert all(machine.name in output for machine in cluster.machines)


def test_explain_of_its_pod_names_it(down: Machine, plugin: Plugin) -> None:
    arguments = ("--from", "unit:backup.service", "--to", f"{SHOP}/web-{down.name}")
    status, _ = plugin.run("explain", *arguments, "--port", "8080")
    assert status != 0


def test_why_not_ready_names_it(down: Machine, plugin: Plugin) -> None:
    _, output = plugin.run("why-not-ready", f"{SHOP}/web-{down.name}")
    assert down.name in output


def test_off_and_on_name_it_and_switch_the_others(
    cluster: SeveralNodes, fleet: Fleet, podgate: Agents, down: Machine, plugin: Plugin
) -> None:
    others = [name for name in podgate if name != down.name]
    status, output = plugin.run("off")
    assert status == 1, output
    assert down.name in output
    for name in others:
        podgate[name].until("the node is off", lambda report: report.max_mode == "off")
    status, output = plugin.run("on")
    assert status == 1, output
    assert down.name in output
    for web in fleet.webs:
        if web.node != down.name:
            until_in_mode(podgate, web, "strict")


def test_enforce_confirms_what_it_can_and_names_it(
    fleet: Fleet, podgate: Agents, down: Machine, plugin: Plugin
) -> None:
    fleet.set_mode("audit")
    up = next(web for web in fleet.webs if web.node != down.name)
    until_in_mode(podgate, up, "audit")
    status, output = plugin.run("enforce", SHOP, "--yes", "--watch", "1s")
    assert status == 1, output
    until_in_mode(podgate, up, "enforce")


def test_it_returns_in_the_mode_of_its_labels(
    site: Site, fleet: Fleet, podgate: Agents, last: Machine
) -> None:
    """After the previous tests: it missed changes of modes."""
    set_mode(fleet, podgate, "enforce")
    polling.wait_until("its agent responds", podgate[last.name].report)
    after = matrix.run(fleet.sources(), fleet.targets())
    assert matrix.differences(site.before, after, closed=matrix.is_own) == []
    assert fleet.harm() == ""
