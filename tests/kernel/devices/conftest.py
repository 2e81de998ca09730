"""Open vSwitch, which all tests share; the other fixtures are those of the kernel tests."""

import subprocess
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from tests.kernel.devices import requirements
from tests.kernel.devices import switch as switches


@pytest.fixture(scope="session")
def vswitchd(
    isolated: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[switches.Daemons]:
    """Open vSwitch's daemons, in the node's namespace."""
    subprocess.run(["modprobe", "--all", *requirements.SWITCH_MODULES], check=True)
    with switches.daemons(tmp_path_factory.mktemp("openvswitch")) as made:
        yield made


@pytest.fixture
def switch(vswitchd: switches.Daemons, lab: labs.Lab) -> Iterator[switches.Switch]:
    with switches.switch(vswitchd, lab) as made:
        yield made
