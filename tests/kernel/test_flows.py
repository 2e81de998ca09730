"""Records of flows by a real gate: what is sent and what is lost is what happened."""

import pathlib
import signal
import socket

import msgspec
import pytest

from agent.flows.records import DropRecord, FlowRecord, LostRecord, Record, StartRecord
from agent.flows.tally import Tally, recorded
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from bpf import abi, loader, map_specs
from bpf.drop_sources import DropSources
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode
from tests.agent.flows.otlp_receiver import attributes, receiver
from tests.kernel.test_agent import isolated_as
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

FLOOD = 20_000
BURST = 100
PORTS = 100


def send(pod: labs.LabPod, port: int, packets: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(packets):
            sock.sendto(b"", (pod.ipv4, port))


def test_packets_that_the_full_table_forgets_are_counted_as_lost(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded
) -> None:
    pod = lab.add_pod("called", 1)
    gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
    sources, table = DropSources(loaded), loaded.map(map_specs.DROP_SOURCES)
    tally = Tally()
    send(pod, 1, 5)
    tally.observe(sources.read())
    tally.begin(gates.counts())
    send(pod, 1, 3)
    sent = lost = 0

    def read() -> None:
        nonlocal sent, lost
        counts = gates.counts()
        tally.observe(one for one in sources.read() if one.ifindex == pod.ifindex)
        tally.account(counts)
        fresh, more = tally.take()
        sent += sum(one.packets for one in fresh)
        lost += more

    read()
    assert (sent, lost) == (3, 0)
    for port in range(1000, 1000 + PORTS):
        send(pod, port, 1)
    value = bytes(abi.CDropSource(count=1))
    # As sources that come and go: it forgets the oldest that have sent once.
    for number in range(abi.MAX_DROP_SOURCES):
        key = abi.CDropSourceKey(cgroup=1 << 40 | number, ifindex=1 << 20, port=1, protocol=17)
        table.set(bytes(key), value)
    send(pod, 3, 2)
    for _ in range(3):
        read()
    DropSources(loaded).forget(pod.ifindex, 1 << 20)
    assert lost > 0
    assert sent + lost == 3 + PORTS + 2
    assert recorded(gates.counts()[pod.ifindex]) == 5 + sent + lost


def records(path: pathlib.Path) -> list[Record]:
    """Without a line that is being written."""
    decoder = msgspec.json.Decoder(Record)
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [decoder.decode(line) for line in whole.splitlines()]


def test_agent_sends_records_to_a_receiver(operator: AgentProcess, lab: labs.Lab) -> None:
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="audit", container={})
    with receiver() as served:
        operator.start(f"--flows-otlp={served.url}", "--flows-interval=1")
        operator.wait_for("the gate", isolated_as("web", "Audit"))
        wait_until("the start", lambda: bool(served.logs))
        send(pod, 7, BURST)
        wait_until("the records", lambda: served.sum("podgate.packets") == BURST)
        operator.stop(signal.SIGTERM)
    found = attributes(served.logs[-1].attributes)
    assert (found["k8s.pod.name"], found["destination.port"]) == ("web", 7)


def test_agent_records_each_packet_of_a_flood_once(
    operator: AgentProcess, lab: labs.Lab, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "flows" / "flows.json"
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="audit", container={})
    operator.start(f"--flows-file={path}", "--flows-interval=1", "--flows-drops=100")
    operator.wait_for("the gate", isolated_as("web", "Audit"))
    wait_until("the start", lambda: path.exists() and bool(records(path)))

    def found(port: int) -> list[FlowRecord]:
        return [one for one in records(path) if isinstance(one, FlowRecord) and one.port == port]

    def packets(port: int) -> int:
        return sum(one.packets for one in found(port))

    send(pod, 7, BURST)
    wait_until("the first records", lambda: packets(7) == BURST)
    send(pod, 7, FLOOD)
    send(pod, 8, 1)
    wait_until("all records", lambda: packets(8) and packets(7) >= BURST + FLOOD)

    def samples() -> tuple[list[DropRecord], int]:
        """Those that were sent, and the number of the others."""
        found = records(path)
        lost = (one.records for one in found if isinstance(one, LostRecord))
        return [one for one in found if isinstance(one, DropRecord)], sum(lost)

    def has_all_samples() -> bool:
        sent, lost = samples()
        return len(sent) + lost == BURST + FLOOD + 1

    wait_until("all samples", has_all_samples)
    operator.stop(signal.SIGTERM)
    assert (packets(7), packets(8)) == (BURST + FLOOD, 1)
    assert isinstance(records(path)[0], StartRecord)
    lost = [one for one in records(path) if isinstance(one, LostRecord)]
    assert {(one.place, one.packets) for one in lost} == {("samples", 0)}
    drops, _ = samples()
    assert {(one.verdict, one.reason) for one in drops} == {("AUDIT", "node")}
    assert {one.destination_address for one in drops} == {pod.ipv4}
    assert {one.destination.pod for one in drops} == {"web"}
    (one,) = found(8)
    assert (one.verdict, one.mode, one.protocol) == ("AUDIT", "audit", socket.IPPROTO_UDP)
    assert one.destination.pod == "web"
    assert one.source.cgroup.startswith("/")
    assert one.first <= one.last <= one.time
