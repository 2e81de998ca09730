"""A relay forwards while its hooks wait to be attached or detached, as other changes of cgroups
come first."""

import contextlib
from collections.abc import Iterator

import pytest

from agent.lab.lab import Lab, LabPod
from agent.relay import messages
from bpf import loader, pins
from tests.kernel import cgroup_lock, cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.relayprocess import RelayProcess, relay_process
from tests.kernel.test_answered_probes import connect
from tests.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.kernel

PORT = 8080


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def relay(
    lab: Lab, loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup
) -> Iterator[RelayProcess]:
    with relay_process(installation, lab.add_pod("web", 1), str(cgroup.directory)) as made:
        yield made


class Connection:
    """One of the relay's, with its end in the pod."""

    def __init__(self, relay: RelayProcess, pod: LabPod) -> None:
        with pod.listen(PORT) as listener:
            self._client = connect(relay, PORT)
            self._server, _ = listener.accept()

    def is_open(self) -> bool:
        """Whether a byte comes through."""
        self._client.sendall(b"?")
        return self._server.recv(10) == b"?"

    def close(self) -> None:
        self._client.close()
        self._server.close()


def test_relay_forwards_while_it_is_engaged_and_while_it_is_released(relay: RelayProcess) -> None:
    with contextlib.closing(Connection(relay, relay.pod)) as old:
        with cgroup_lock.held():
            relay.begin_to_engage()
            relay.set_answers()
            with contextlib.closing(Connection(relay, relay.pod)) as new:
                assert new.is_open()
            assert old.is_open()
        relay.wait_for(messages.Engaged)
        with cgroup_lock.held():
            relay.release(drain_seconds=3600)
            relay.set_answers()
            assert old.is_open()
            assert relay.process.poll() is None
    assert relay.process.wait(PATIENCE_SECONDS) == 0
