"""HostEgressPolicies in the kernel: which cgroups of the host reach which destinations."""

import asyncio
import contextlib
import errno
import ipaddress
import json
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, host_egress, loader, map_specs, maps, pins, program_specs
from bpf.drop_events import DropEventReader
from bpf.host_egress import EgressTables, HostEgress, TooMuchError
from bpf.host_egress_tables import EgressRule, EgressSubject, EgressTable
from bpf.node_config import NodeConfig
from bpf.verdicts import Reason, Verdict
from probes.netns import netns_cookie
from tests.kernel import cgroups, offers, sending
from tests.kernel.cgroups import Cgroup

pytestmark = pytest.mark.kernel

PORT = 2379
POLICY = "secrets"
BOTH = pytest.mark.parametrize("version", [4, 6])


class Destination:
    """A pod as what is to be protected: its servers, and what reaches them."""

    def __init__(self, pod: labs.LabPod) -> None:
        self.pod = pod
        self._tcp = pod.listen(PORT)
        self._tcp.settimeout(20)
        self._udp = pod.open_socket(socket.AF_INET6, socket.SOCK_DGRAM)
        self._udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._udp.settimeout(20)
        self._udp.bind(("", PORT))

    def close(self) -> None:
        self._tcp.close()
        self._udp.close()

    def address(self, version: int) -> str:
        return self.pod.ipv4 if version == 4 else self.pod.ipv6

    def arrived(self, version: int) -> tuple[int, set[str]]:
        """Connections and datagrams since the last call: those before one of the test's own, which
        no policy selects."""
        address = self.address(version)
        connections = 0
        with socket.create_connection((address, PORT), 20) as end:
            while True:
                accepted, peer = self._tcp.accept()
                accepted.close()
                if peer[1] == end.getsockname()[1]:
                    break
                connections += 1
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"end", (address, PORT))
        received: list[str] = []
        while not received or received[-1] != "end":
            received.append(self._udp.recv(100).decode())
        return connections, set(received[:-1])


ATTEMPTS = """
import os, socket, sys
def attempt():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        return sock.connect_ex((sys.argv[1], int(sys.argv[2])))
results = {attempt()}
print("begun", flush=True)
while not os.path.exists(sys.argv[3]):
    results.add(attempt())
print(*results, flush=True)
"""


@contextlib.contextmanager
def attempting(group: Cgroup, address: str, end: pathlib.Path) -> Iterator[set[int]]:
    """A process connects all the time during the block; then the set has all of its results."""
    arguments = [sys.executable, "-S", "-c", ATTEMPTS, address, str(PORT), str(end)]
    results: set[int] = set()
    with group.popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        try:
            yield results
        finally:
            end.touch()
            results |= {int(one) for one in process.stdout.readline().split()}
    end.unlink()


@contextlib.contextmanager
def of_schema(installation: pins.Pins) -> Iterator["Egress"]:
    """The programs of another schema with maps of their own, loaded and not attached."""
    installation.prepare()
    directory = asyncio.run(host_egress.load(installation))
    with maps.Map.open(installation.map(map_specs.CONFIG), map_specs.CONFIG) as config:
        config.set(bytes(4), bytes(abi.CConfig(node_netns=netns_cookie())))
    with contextlib.closing(HostEgress(directory, installation)) as kernel:
        yield Egress(kernel)


class Egress:
    """The programs, attached, and one policy."""

    def __init__(self, kernel: HostEgress) -> None:
        self.kernel = kernel
        self.tables = kernel.tables

    def set(
        self,
        *subjects: Cgroup,
        rules: Sequence[EgressRule],
        is_enforced: bool = True,
        excepted: Sequence[Cgroup] = (),
    ) -> None:
        self.tables.numbers({POLICY})
        table = {one.id: EgressSubject(one.level, denied=1) for one in subjects}
        table |= {one.id: EgressSubject(one.level, excepted=1) for one in excepted}
        self.tables.write(EgressTable(table, tuple(rules), int(is_enforced)))

    def count(self, verdict: Verdict) -> int:
        return self.tables.counts().get((POLICY, verdict), 0)

    def sources(self) -> dict[tuple[int, int, Verdict], int]:
        return {(one.cgroup, one.protocol, one.verdict): one.count for one in self.tables.sources()}


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    offers.need_netns_cookie()
    made = NodeConfig(loaded)
    made.set_netns(netns_cookie())
    yield made
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.fixture
def egress(installation: pins.Pins, loaded: loader.Loaded, config: NodeConfig) -> Iterator[Egress]:
    directory = asyncio.run(host_egress.load(installation))
    mount = cgroup2_mount()
    assert mount is not None
    kernel = HostEgress(directory, installation)
    try:
        states = kernel.attach(mount)
        assert [state.problem for state in states] == [None] * len(program_specs.EGRESS_HOOKS)
        yield Egress(kernel)
    finally:
        kernel.close()
        host_egress.remove(installation)


@pytest.fixture
def destination(lab: labs.Lab) -> Iterator[Destination]:
    with contextlib.closing(Destination(lab.add_pod("etcd", 1))) as made:
        yield made


@pytest.fixture
def subject() -> Iterator[Cgroup]:
    """A pod's cgroup; its container's is below."""
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def container(subject: Cgroup) -> Iterator[Cgroup]:
    with cgroups.cgroup("app", below=subject) as made:
        yield made


@pytest.fixture
def other() -> Iterator[Cgroup]:
    """That no policy names."""
    with cgroups.cgroup() as made:
        yield made


def send(group: Cgroup, to: str, *ways: str, other: Cgroup, port: int = PORT) -> dict[str, int]:
    procs = other.directory / "cgroup.procs"
    done = group.run(
        [sys.executable, "-m", "tests.kernel.sending", to, str(port), str(procs), *ways]
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def to_port(destination: Destination) -> list[EgressRule]:
    """Both addresses of the pod, at the port alone."""
    return [
        EgressRule(0, ipaddress.ip_network(address), first_port=PORT, last_port=PORT)
        for address in destination.pod.addresses
    ]


def ways_of(version: int) -> list[str]:
    found = [*sending.CONNECTIONS, *sending.DATAGRAMS]
    return found if version == 4 else [way for way in found if way != "mapped"]


@BOTH
def test_denied_cgroup_gets_eperm_by_every_way_and_nothing_arrives(
    destination: Destination,
    egress: Egress,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
    version: int,
) -> None:
    egress.set(subject, rules=to_port(destination))
    address, ways = destination.address(version), ways_of(version)
    done = send(container, address, *ways, other=other)
    # Its SYN is dropped: the process that connects is no subject.
    assert done.pop("given-tcp") == 0
    assert done == dict.fromkeys(done, errno.EPERM)
    assert destination.arrived(version) == (0, set())
    assert egress.count(Verdict.DROP) >= len(ways)
    assert egress.count(Verdict.WOULD_DROP) == 0


@BOTH
def test_other_cgroups_and_other_ports_are_untouched(
    destination: Destination,
    egress: Egress,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
    version: int,
) -> None:
    address, ways = destination.address(version), ways_of(version)
    connections = sum(way in sending.CONNECTIONS for way in ways)
    egress.set(subject, rules=to_port(destination))
    done = send(other, address, *ways, other=other)
    assert done == dict.fromkeys(ways, 0)
    assert destination.arrived(version) == (connections, set(sending.DATAGRAMS))
    assert egress.sources() == {}
    elsewhere = ipaddress.ip_network("198.18.77.0/24")
    egress.set(subject, rules=[EgressRule(0, elsewhere), EgressRule(0, None, protocol=132)])
    assert send(container, address, *ways, other=other) == dict.fromkeys(ways, 0)
    assert destination.arrived(version) == (connections, set(sending.DATAGRAMS))


def test_audit_counts_each_attempt_once_and_denies_none(
    destination: Destination, egress: Egress, container: Cgroup, subject: Cgroup, other: Cgroup
) -> None:
    egress.set(subject, rules=to_port(destination), is_enforced=False)
    ways = ways_of(4)
    assert send(container, destination.address(4), *ways, other=other) == dict.fromkeys(ways, 0)
    assert destination.arrived(4)[1] == set(sending.DATAGRAMS)
    tcp, udp = (container.id, 6, Verdict.WOULD_DROP), (container.id, 17, Verdict.WOULD_DROP)
    assert egress.sources() == {
        tcp: len(sending.CONNECTIONS),
        udp: len(sending.DATAGRAMS),
    }
    assert egress.count(Verdict.DROP) == 0


def test_nearest_cgroup_decides_between_subject_and_exception(
    destination: Destination, egress: Egress, container: Cgroup, subject: Cgroup, other: Cgroup
) -> None:
    egress.set(subject, rules=to_port(destination), excepted=[container])
    address = destination.address(4)
    assert send(container, address, "tcp", "udp", other=other) == {"tcp": 0, "udp": 0}
    assert send(subject, address, "tcp", other=other) == {"tcp": errno.EPERM}
    egress.set(container, rules=to_port(destination), excepted=[subject])
    assert send(container, address, "tcp", other=other) == {"tcp": errno.EPERM}
    assert send(subject, address, "tcp", other=other) == {"tcp": 0}


def test_kubelet_is_never_a_subject(
    destination: Destination,
    egress: Egress,
    config: NodeConfig,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
) -> None:
    """Also if a policy names the slice that it is in; what it starts in cgroups of its own is."""
    egress.set(subject, rules=to_port(destination))
    config.set_kubelet(container.id)
    ways = ways_of(4)
    assert send(container, destination.address(4), *ways, other=other) == dict.fromkeys(ways, 0)
    assert egress.sources() == {}
    assert send(subject, destination.address(4), "tcp", other=other) == {"tcp": errno.EPERM}


@BOTH
def test_ports_of_the_node_itself(
    lab: labs.Lab,
    egress: Egress,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
    loaded: loader.Loaded,
    version: int,
) -> None:
    """At its loopback, and by no address, which is the loopback as well."""
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    loopback, nowhere = ("::1", "::") if version == 6 else ("127.0.0.1", "0.0.0.0")
    egress.set(subject, rules=[EgressRule(0, is_nodes=True, protocol=6)])
    with socket.create_server(("", 0), family=family) as server:
        port = server.getsockname()[1]
        for address in (loopback, nowhere):
            denied = send(container, address, "tcp", "fastopen", other=other, port=port)
            assert denied == {"tcp": errno.EPERM, "fastopen": errno.EPERM}
            assert send(other, address, "tcp", other=other, port=port) == {"tcp": 0}


def test_connections_from_before_end_and_accepted_ones_do_not(
    destination: Destination,
    egress: Egress,
    container: Cgroup,
    subject: Cgroup,
) -> None:
    """A subject's server continues to answer its clients, wherever these are."""
    script = (
        "import socket, sys\n"
        "server = socket.create_server(('', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "accepted, _ = server.accept()\n"
        "sys.stdin.readline()\n"
        "accepted.sendall(b'answer')\n"
        "server.close()\n"
        "accepted.sendall(b'more')\n"
        "print('sent', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = container.popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = destination.pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
        with client:
            client.settimeout(20)
            client.connect((str(labs.NODE_IPV4), port))
            network = ipaddress.ip_network(destination.pod.ipv4)
            egress.set(subject, rules=[EgressRule(0, network)])
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"sent\n"
            assert client.recv(6, socket.MSG_WAITALL) == b"answer"
            assert client.recv(4, socket.MSG_WAITALL) == b"more"
        process.stdin.close()
    assert egress.count(Verdict.DROP) == 0


def test_socket_connected_before_the_policy_sends_no_more(
    destination: Destination, egress: Egress, container: Cgroup, subject: Cgroup, other: Cgroup
) -> None:
    script = (
        "import socket, sys\n"
        "to = (sys.argv[1], int(sys.argv[2]))\n"
        "tcp = socket.create_connection(to)\n"
        "udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "udp.connect(to)\n"
        "print('connected', flush=True)\n"
        "sys.stdin.readline()\n"
        "tcp.send(b'secret')\n"
        "try:\n"
        "    udp.send(b'secret')\n"
        "except PermissionError:\n"
        "    print('EPERM', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-S", "-c", script, destination.address(4), str(PORT)]
    process = container.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        accepted, _ = destination._tcp.accept()
        egress.set(subject, rules=to_port(destination))
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"EPERM\n"
        accepted.setblocking(False)
        with accepted, pytest.raises(BlockingIOError):
            accepted.recv(1)
        assert egress.count(Verdict.DROP) >= 2
        # The same connection, as soon as the policy is gone: its data are sent again.
        egress.tables.write(EgressTable({}, (), 0))
        process.stdin.close()
    assert send(container, destination.address(4), "tcp", other=other) == {"tcp": 0}


def test_other_network_namespaces_are_untouched(
    lab: labs.Lab, egress: Egress, container: Cgroup, subject: Cgroup, config: NodeConfig
) -> None:
    """A subject's socket in a namespace of its own has another loopback."""
    offers.need_features(host_egress.PROGRAM_SET.features)
    egress.set(subject, rules=[EgressRule(0, is_nodes=True)])
    script = (
        "import socket\n"
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:\n"
        "    sock.sendto(b'x', ('127.0.0.1', 9))\n"
    )
    command = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-S", "-c"]
    done = container.run(["unshare", "--net", *command, script])
    assert (done.returncode, done.stderr) == (0, b"")
    assert container.run([sys.executable, "-S", "-c", script]).returncode != 0


def test_agent_that_is_missing_keeps_it_closed_until_the_dead_mans_time(
    destination: Destination,
    egress: Egress,
    loaded: loader.Loaded,
    config: NodeConfig,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
) -> None:
    egress.set(subject, rules=to_port(destination))
    for age_seconds, expected in ((50, errno.EPERM), (70, 0)):
        past = NodeConfig(loaded, now_ns=lambda age=age_seconds: time.monotonic_ns() - age * 10**9)  # type: ignore[misc]
        past.set_limits(stale_after_seconds=15, dead_man_seconds=60)
        past.beat()
        done = send(container, destination.address(4), "tcp", "raw", other=other)
        assert done == {"tcp": expected, "raw": expected}


def test_drop_events_name_the_destination(
    destination: Destination,
    egress: Egress,
    loaded: loader.Loaded,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
) -> None:
    with contextlib.closing(DropEventReader(loaded)) as reader:
        reader.read()
        egress.set(subject, rules=to_port(destination))
        send(container, destination.address(6), "tcp", "given-udp", other=other)
        [by_call, by_packet] = reader.read()
    for event in (by_call, by_packet):
        assert (event.reason, event.verdict) == (Reason.HOST_EGRESS, Verdict.DROP)
        assert (str(event.destination), event.destination_port) == (destination.pod.ipv6, PORT)
        assert event.cgroup == container.id
    assert by_call.process_name.startswith("python")


def test_numbers_of_policies_last_and_free_ones_start_at_zero(
    destination: Destination, egress: Egress, container: Cgroup, subject: Cgroup, other: Cgroup
) -> None:
    egress.set(subject, rules=to_port(destination))
    send(container, destination.address(4), "tcp", other=other)
    assert egress.tables.numbers({POLICY, "more"}) == {POLICY: 0, "more": 1}
    assert egress.count(Verdict.DROP) == 1
    assert egress.tables.numbers({"more"}) == {"more": 1}
    assert egress.tables.numbers({"more", "again"}) == {"more": 1, "again": 0}
    assert set(egress.tables.counts().values()) == {0}
    assert egress.tables.sources() == []


@pytest.mark.parametrize("step", [1, -1], ids=["upgrade", "roll-back"])
def test_another_schema_takes_the_policies_over_without_a_gap_and_back_again(
    destination: Destination,
    egress: Egress,
    installation: pins.Pins,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
    tmp_path: pathlib.Path,
    step: int,
) -> None:
    another = pins.Pins(installation.bpffs, abi.SCHEMA + step)
    mount = cgroup2_mount()
    assert mount is not None
    address = destination.address(4)
    egress.set(subject, rules=to_port(destination))
    with of_schema(another) as taken:
        with attempting(container, address, tmp_path / "end") as results:
            for made, of in ((taken, another), (egress, installation), (taken, another)):
                made.set(subject, rules=to_port(destination))
                assert host_egress.is_of_another_schema(of)
                assert [state.problem for state in made.kernel.attach(mount) if state.problem] == []
                assert all(made.kernel.attached(mount).values())
                assert not host_egress.is_of_another_schema(of)
        assert results == {errno.EPERM}
        before = taken.count(Verdict.DROP)
        assert send(container, address, "tcp", "raw", other=other) == {
            "tcp": errno.EPERM,
            "raw": errno.EPERM,
        }
        assert taken.count(Verdict.DROP) == before + 2
    host_egress.remove(another)
    assert send(container, address, "tcp", other=other) == {"tcp": 0}
    another.discard_schema(another.schema)


def test_readers_see_the_policies_without_an_agent(
    egress: Egress, installation: pins.Pins, subject: Cgroup
) -> None:
    rule = EgressRule(0, ipaddress.ip_network("fd00:18::/64"), protocol=17, last_port=80)
    egress.set(subject, rules=[rule])
    with EgressTables(installation) as tables:
        found = tables.table()
    assert found.rules == (rule,)
    assert set(found.subjects) == {subject.id}
    assert found.enforced == 1


def test_more_than_the_tables_hold_is_an_error_and_changes_nothing(
    egress: Egress, subject: Cgroup
) -> None:
    egress.set(subject, rules=[EgressRule(0)])
    with pytest.raises(TooMuchError, match="129 destinations"):
        egress.set(subject, rules=[EgressRule(0)] * 129)
    deep = {number: EgressSubject(number, denied=1) for number in range(1, 9)}
    with pytest.raises(TooMuchError, match="depths"):
        egress.tables.write(EgressTable(deep, (), 0))
    with pytest.raises(TooMuchError, match="65"):
        egress.tables.numbers({str(number) for number in range(65)})
    assert set(egress.tables.table().subjects) == {subject.id}


def test_removal_leaves_nothing(
    egress: Egress,
    installation: pins.Pins,
    destination: Destination,
    container: Cgroup,
    subject: Cgroup,
    other: Cgroup,
) -> None:
    egress.set(subject, rules=to_port(destination))
    assert host_egress.is_installed(installation)
    host_egress.remove(installation)
    assert not host_egress.is_installed(installation)
    assert not list(pathlib.Path(installation.maps).glob("egress_*"))
    ways = ways_of(4)
    assert send(container, destination.address(4), *ways, other=other) == dict.fromkeys(ways, 0)
