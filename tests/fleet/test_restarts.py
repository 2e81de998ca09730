"""Programs of nodes restart under strict, beside continuous connects."""

from collections.abc import Callable

import pytest

from tests.cluster.machine import Machine
from tests.fleet import watching
from tests.fleet.conftest import Agents, Site
from tests.fleet.test_modes import set_mode
from tests.fleet.workload import Fleet
from tests.networks import traffic

pytestmark = pytest.mark.kernel

_AFTERWARDS_SECONDS = 10.0


@pytest.fixture(autouse=True)
def strict(fleet: Fleet, podgate: Agents) -> None:
    set_mode(fleet, podgate, "strict")


def _restart(site: Site, what: str, machine: Machine) -> None:
    if what == "network":
        site.network.restart(machine.name)
    elif what == "service proxy":
        site.proxy.restart(machine.name)
    else:
        machine.kubelet.restart()
        machine.kubelet.wait_until_ready()


@pytest.mark.parametrize("what", ["network", "service proxy", "kubelet"])
def test_connects_and_probes_do_not_notice(
    site: Site, fleet: Fleet, what: str, record_property: Callable[[str, object], None]
) -> None:
    watch = traffic.Watch(*watching.paths(site.cluster, fleet))
    with watch.running():
        for machine in site.cluster.machines:
            _restart(site, what, machine)
        assert traffic.holds_for(_AFTERWARDS_SECONDS, fleet.harm) == ""
    record_property("figures", watch.summary)
    assert not any(watch.wrong.values()), watch.wrong
