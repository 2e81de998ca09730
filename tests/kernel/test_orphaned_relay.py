"""A relay whose agent was killed: what it proxies to, what ends it, and who finds it."""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.exits import has_ended
from agent.lab.lab import Lab, LabPod
from agent.linux.procfs import Procfs
from agent.logs import Event
from agent.relay import interfaces as relay_interfaces
from agent.relay.orphanhood import WATCH_SECONDS
from agent.strict import orphans
from bpf import abi, cleanup, pins
from bpf.redirect import seconds_since_beat
from tests.kernel import cgroup_lock, cgroups, nodeclient, offers, strictnode, versions
from tests.kernel.cgroups import Cgroup
from tests.kernel.nodeclient import node_client
from tests.kernel.strictnode import wait_until
from tests.kernel.test_relay_conditions import RANGES, dial, is_strict
from tests.nodes.worker import Worker
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

PORT = 8080
BEAT_LIMIT_SECONDS = 0.3
# podgate does not run it itself: a server sees the kubelet's connections only.
PROBE = {
    "livenessProbe": {
        "tcpSocket": {"port": PORT},
        "periodSeconds": 3600,
        "initialDelaySeconds": 3600,
    }
}


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


class Seen:
    """What a pod's server sees of the kubelet's connections."""

    def __init__(self, kubelet: Cgroup, pod: LabPod, listener: socket.socket) -> None:
        self._kubelet = kubelet
        self._pod = pod
        self._listener = listener

    def peers(self, *, in_handover: bool = False) -> set[str]:
        """Source addresses of one connection to each of its addresses. in_handover: a relay of
        other maps may end meanwhile; getpeername shows its address then (`Redirect.disengage`)."""
        for address in (self._pod.ipv4, self._pod.ipv6):
            assert dial(self._kubelet, address) == address or in_handover
        return self.next_peers()

    def next_peers(self) -> set[str]:
        """Source addresses of the next two connections."""
        found = set()
        for _ in range(2):
            connection, peer = self._listener.accept()
            connection.close()
            found.add(peer[0].removeprefix("::ffff:"))
        return found

    def is_relayed(self, *, in_handover: bool = False) -> bool:
        return self.peers(in_handover=in_handover) == {self._pod.ipv4, self._pod.ipv6}

    def is_direct(self) -> bool:
        return not self.peers() & {self._pod.ipv4, self._pod.ipv6}


@pytest.fixture
def pod(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


@pytest.fixture
def seen(kubelet: Cgroup, pod: LabPod) -> Iterator[Seen]:
    with pod.listen(PORT) as listener:
        yield Seen(kubelet, pod, listener)


@pytest.fixture
def newer(worker: Worker) -> pathlib.Path:
    """A version with the next schema; the same that tests/kernel/test_continuity.py has."""
    schema = abi.SCHEMA + 1

    def make(directory: pathlib.Path) -> None:
        directory.mkdir()
        versions.of_schema(directory, schema, gate_addresses=4)
        versions.compile_programs(directory)

    return worker.made_once(f"schema-{schema}", make)


def start(operator: AgentProcess, kubelet: Cgroup, *extra: str) -> None:
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES, *extra)
    operator.wait_for("strict", lambda report: report.pid == operator.pid and is_strict(report))


def kill_agent(operator: AgentProcess) -> int:
    """The process of its relay."""
    relay = int(operator.log_lines(Event.RELAY_STARTED)[-1]["pid"])
    operator.stop(signal.SIGKILL)
    return relay


@pytest.fixture
def orphan(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, seen: Seen, no_relays: None
) -> int:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet)
    found = kill_agent(operator)
    assert seen.is_relayed()
    return found


def test_next_agent_releases_it_once_its_own_relay_serves(
    orphan: int, operator: AgentProcess, kubelet: Cgroup, seen: Seen
) -> None:
    start(operator, kubelet)
    operator.event(Event.PREVIOUS_RELAY_RELEASED, pid=orphan)
    assert seen.is_relayed()
    wait_until("the orphan gone", lambda: has_ended(orphan))
    assert seen.is_relayed()


def test_next_agent_releases_it_if_no_pod_is_in_strict_any_more(
    orphan: int, operator: AgentProcess, pod: LabPod, kubelet: Cgroup, seen: Seen
) -> None:
    operator.write_manifest(pod, mode="enforce", container=PROBE)
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES)
    wait_until("the orphan gone", lambda: has_ended(orphan))
    assert seen.is_direct()


def test_relay_of_another_version_serves_until_the_next_one_does(
    operator: AgentProcess,
    pod: LabPod,
    kubelet: Cgroup,
    seen: Seen,
    no_relays: None,
    newer: pathlib.Path,
) -> None:
    """Its maps are others, and its hooks come first."""
    operator.write_manifest(pod, mode="strict", container=PROBE)
    operator.start_in(newer, "--kubelet", f"cgroup:{kubelet.path}", *RANGES)
    operator.wait_for("strict", lambda report: report.pid == operator.pid and is_strict(report))
    orphan = kill_agent(operator)
    assert seen.is_relayed()
    start(operator, kubelet)
    assert seen.is_relayed(in_handover=True)
    operator.event(Event.PREVIOUS_RELAY_RELEASED, pid=orphan)
    wait_until("the orphan gone", lambda: has_ended(orphan))
    assert seen.is_relayed()


def test_it_ends_after_its_time(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, seen: Seen, no_relays: None
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet, "--orphan-relay-seconds", "2")
    relay = kill_agent(operator)
    assert seen.is_relayed()
    wait_until("the relay gone", lambda: has_ended(relay))
    assert seen.is_direct()


def test_it_ends_with_its_agent_without_such_a_time(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, seen: Seen, no_relays: None
) -> None:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    start(operator, kubelet, "--orphan-relay-seconds", "0")
    kill_agent(operator)
    wait_until("direct connections", seen.is_direct)


@pytest.mark.parametrize("is_hung", [False, True], ids=["", "hung"])
def test_cleanup_ends_it(orphan: int, operator: AgentProcess, seen: Seen, *, is_hung: bool) -> None:
    if is_hung:
        os.kill(orphan, signal.SIGSTOP)
    done = operator.cleanup()
    assert done.returncode == 0, done.stderr
    assert has_ended(orphan)
    assert relay_interfaces.present() == {}
    assert seen.is_direct()


def test_off_ends_it(orphan: int, operator: AgentProcess, seen: Seen) -> None:
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    done = operator.run("off", "--node", *where)
    assert done.returncode == 0, done.stderr
    assert has_ended(orphan)
    assert seen.is_direct()


def test_it_ends_by_itself_when_its_hooks_are_detached(
    orphan: int, operator: AgentProcess, seen: Seen
) -> None:
    cleanup.detach_everything(pins.Pins(operator.bpffs))
    wait_until("the orphan gone", lambda: has_ended(orphan))
    assert seen.is_direct()


def test_it_serves_while_others_change_cgroups(
    orphan: int, operator: AgentProcess, kubelet: Cgroup, pod: LabPod, seen: Seen
) -> None:
    """For longer than a heartbeat counts; meanwhile it checks whether its hooks are attached."""
    installation = pins.Pins(operator.bpffs)
    targets = [f"tcp,{address},{PORT}" for address in (pod.ipv4, pod.ipv6)]
    with node_client(kubelet) as client:
        assert client.probe(targets) == dict.fromkeys(targets, nodeclient.OK)
        seen.next_peers()
        with cgroup_lock.held():
            enough = time.monotonic() + WATCH_SECONDS + 2 * BEAT_LIMIT_SECONDS
            wait_until(
                "heartbeats",
                lambda: time.monotonic() - seconds_since_beat(installation) > enough,
            )
            assert client.probe(targets) == dict.fromkeys(targets, nodeclient.OK)
            assert seen.next_peers() == {pod.ipv4, pod.ipv6}


def test_it_releases_itself_when_the_node_does_not_reach_it(orphan: int, seen: Seen) -> None:
    rules = (
        "table inet another-firewall {\nchain output {\ntype filter hook output priority 0\n"
        'oifname "podgate-relay*" drop\n}\n}\n'
    )
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    try:
        wait_until("the orphan gone", lambda: has_ended(orphan))
        assert seen.is_direct()
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "another-firewall"], check=True)


def test_it_withdraws_the_target_of_a_pod_that_is_gone(
    orphan: int, operator: AgentProcess, lab: Lab, pod: LabPod
) -> None:
    """Another pod may get its address, and the gate admits the kubelet to that one."""
    assert strictnode.relay_addresses(operator.bpffs).keys() == {pod.ipv4, pod.ipv6}
    lab.remove_pod("web")
    wait_until("no target", lambda: not strictnode.relay_addresses(operator.bpffs))
    assert not has_ended(orphan)


def test_process_that_only_looks_like_a_relay_is_none(orphan: int) -> None:
    with contextlib.closing(_Stranger()):
        found = asyncio.run(_found())
    assert found == [orphan]


def test_relay_of_another_node_is_none_when_a_relay_ends_meanwhile(
    own_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a namespace that ends is the first that the kernel gives to another one. Nodes
    of one machine, as kind's, see each other's processes."""
    candidates = orphans.candidates
    name = relay_interfaces.name_of(0)
    with (
        contextlib.closing(_Stranger("unshare", "--net")) as other,
        contextlib.ExitStack() as stack,
    ):
        ending = stack.enter_context(contextlib.closing(_Stranger("unshare", "--net")))
        pair = ("ip", "link", "add", name, "type", "veth", "peer", "netns", str(ending.pid))
        subprocess.run(pair, check=True)
        ended = []

        def end_first(procfs: Procfs) -> list[int]:
            stack.close()
            wait_until("its interface gone", lambda: not relay_interfaces.present())
            ended.append(ending.pid)
            return candidates(procfs)

        monkeypatch.setattr(orphans, "candidates", end_first)
        found = asyncio.run(_found())
        assert ended == [ending.pid]
        assert other.pid in candidates(Procfs())
        assert found == []


class _Stranger:
    def __init__(self, *prefix: str) -> None:
        """prefix: of the command, for instance one that moves the process to another namespace."""
        script = "import sys; print(flush=True); sys.stdin.read()"
        self._process = subprocess.Popen(
            [*prefix, *BARE_PYTHON, "-c", script, "-m", "agent.relay", "3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.pid = self._process.pid

    def close(self) -> None:
        self._process.communicate()


async def _found() -> list[int]:
    processes = await orphans.find()
    for process in processes:
        process.release()
    return [process.pid for process in processes]
