"""Sockets that had an option to pass no gate before the hooks were attached. Later ones do not get
it: tests/attacks/tricks/skipping.py."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, map_specs, pins, program_specs
from bpf.gates import GateConfig, Gates
from bpf.hooks import Hooks
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode
from probes.netns import netns_cookie
from tests.attacks.site import NOT_OFFERED
from tests.attacks.tricks.skipping import WAYS
from tests.kernel import frames, offers, wire

pytestmark = pytest.mark.kernel


@pytest.fixture
def line(lab: labs.Lab, gates: Gates) -> Iterator[wire.Wire]:
    pod = lab.add_pod("web", 1)
    with pod.listen(80), wire.Wire(pod) as made:
        made.warm_up()
        gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
        yield made


@pytest.fixture
def attach_hooks(
    loaded: loader.Loaded, installation: pins.Pins, line: wire.Wire
) -> Iterator[Callable[[], None]]:
    offers.need_netns_cookie()
    mount = cgroup2_mount()
    assert mount is not None
    hooks = Hooks(loaded, installation, mount)
    NodeConfig(loaded).set_netns(netns_cookie())

    def attach() -> None:
        assert [hook.problem for hook in hooks.attach()] == [None] * len(program_specs.HOOKS)

    yield attach
    hooks.detach()
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.mark.parametrize("way", WAYS)
def test_socket_keeps_an_option_that_it_has(
    line: wire.Wire, attach_hooks: Callable[[], None], way: str
) -> None:
    """A known limit."""
    with contextlib.ExitStack() as stack:
        try:
            send = stack.enter_context(WAYS[way](line.pod.interface))
        except OSError as error:
            if error.errno not in NOT_OFFERED:
                raise
            pytest.skip(f"{offers.NOT_OFFERED}{error}")
        attach_hooks()
        ends = line.ends(4)
        send(frames.segment(ends, frames.SYN))
        assert line.flush().opened(ends)
