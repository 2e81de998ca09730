"""Loaded programs and gates for the kernel tests: one compile for all of them."""

import asyncio
import itertools
import pathlib
import signal
from collections.abc import Callable, Iterator

import pytest

from agent.default_deny import table as default_deny_table
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, Launch
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, cleanup, loader, map_specs, pins
from bpf import gates as gates_module
from bpf.hooks import Hooks
from bpf.node_config import NodeConfig
from bpf.rule_evaluation import Cgroup
from probes.netns import netns_cookie
from tests import polling
from tests.cni import calling
from tests.kernel import attached, cgroups, enforcing, guarded, offers
from tests.kernel.explained import own_source
from tests.kernel.secondagent import SecondAgent
from tests.nodes import node
from tests.nodes.worker import Worker

_numbers = itertools.count()

MakeGates = Callable[..., gates_module.Gates]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests with the mark `enforce_only` out of a run in strict."""
    if not enforcing.IS_STRICT:
        return
    left_out = [item for item in items if item.get_closest_marker("enforce_only")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def installation(isolated: None) -> pins.Pins:
    """Where most tests pin; a directory of the lab's bpffs."""
    return pins.Pins(node.SHARED)


@pytest.fixture(scope="session")
def loaded(worker: Worker) -> loader.Loaded:
    return worker.shared().loaded


@pytest.fixture(scope="session")
def moving_copies(worker: Worker) -> None:
    """`loaded` has the gates' moving copies."""
    worker.shared().load_moving_copies()


@pytest.fixture
def fresh_pins(isolated: None) -> Iterator[pins.Pins]:
    """An installation of the test's own: nothing is pinned there."""
    made = _pins(f"fresh{next(_numbers)}")
    yield made
    made.remove_everything()


@pytest.fixture(scope="session")
def plugin(worker: Worker) -> pathlib.Path:
    """podgate-cni, built once in a run."""
    return worker.made_once("podgate-cni", calling.build)


@pytest.fixture(scope="session")
def installed(worker: Worker) -> pins.Pins:
    """An installation for the agents of a node: programs and maps are pinned there, as they were
    loaded. Who uses it removes it."""
    return worker.installed().pins


@pytest.fixture
def installed_pins(own_node: None, installed: pins.Pins) -> Iterator[pins.Pins]:
    """The same, removed at the test's end."""
    yield installed
    installed.remove_everything()


@pytest.fixture
def no_relays(isolated: None) -> None:
    """The kernel removes interfaces of relays of previous tests some time after their ends."""
    polling.wait_until("interfaces of relays are gone", lambda: not attached.relays())


@pytest.fixture(scope="module")
def cgroup(isolated: None) -> Cgroup:
    """That of the tests' own process."""
    found = own_source().cgroup
    assert found is not None
    return found


@pytest.fixture
def operator(
    launch: Launch, tmp_path: pathlib.Path, installed_pins: pins.Pins
) -> Iterator[AgentProcess]:
    """Starts agents on pins of the test's own; stops them, and removes what they have attached and
    the default-deny table. Their kubelet is in a cgroup without processes."""
    made = AgentProcess(tmp_path, installed_pins.bpffs, launch)
    with cgroups.cgroup() as kubelet:
        made.kubelet = ("--kubelet", f"cgroup:{kubelet.path}")
        yield made
        made.stop(signal.SIGKILL)
        # Before 6.6 with filters, which outlast their pins.
        cleanup.detach_everything(installed_pins)
        asyncio.run(default_deny_table.remove())


@pytest.fixture
def second(operator: AgentProcess, tmp_path: pathlib.Path) -> Iterator[SecondAgent]:
    """Another agent beside the operator's, not started yet."""
    made = SecondAgent(operator, tmp_path / "second")
    yield made
    made.stop(signal.SIGKILL)


@pytest.fixture
def make_gates(
    lab: labs.Lab, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[MakeGates]:
    """`Gates`, of another attachment or other programs if wanted; all removed at the end."""
    made: list[gates_module.Gates] = []

    with enforcing.made_in_mode(loaded, installation) as make_in_mode:

        def make(
            attachment: gates_module.Attachment | None = None, programs: loader.Loaded | None = None
        ) -> gates_module.Gates:
            if attachment is gates_module.Attachment.TCX:
                offers.need_tcx()
            made.append(make_in_mode(programs or loaded, installation, attachment))
            return made[-1]

        yield make
        for gates in made:
            for ifindex in gates.installed():
                gates.remove(ifindex)
            gates.close()


@pytest.fixture
def gates(make_gates: MakeGates) -> gates_module.Gates:
    """Gates by clsact: attached a hundred times as fast as by tcx."""
    return make_gates(gates_module.Attachment.CLSACT)


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def watched(
    request: pytest.FixtureRequest, lab: labs.Lab, gates: gates_module.Gates
) -> Iterator[guarded.PodState]:
    """A pod and its neighbour, routed or on a bridge."""
    pod = lab.add_pod("web", 1, bridged=request.param)
    neighbour = lab.add_pod("neighbour", 2, bridged=request.param)
    with guarded.guarded(gates, pod, neighbour) as made:
        yield made


@pytest.fixture
def attached_hooks(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[None]:
    """The hooks at the root cgroup, for this namespace."""
    offers.need_netns_cookie()
    NodeConfig(loaded).set_netns(netns_cookie())
    mount = cgroup2_mount()
    assert mount is not None
    made = Hooks(loaded, installation, mount)
    made.attach()
    yield
    made.detach()
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


def _pins(name: str) -> pins.Pins:
    directory = labs.LAB_DIRECTORY / "bpf" / name
    directory.mkdir()
    return pins.Pins(directory)
