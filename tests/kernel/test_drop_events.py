"""Drop events: their content, and that a flood of drops costs no reader time."""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agent.lab import attempts
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from bpf import loader, map_specs, program_specs, syscalls
from bpf.drop_events import DropEventReader
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import frames, offers, skb
from tests.kernel.counting import Counting

pytestmark = pytest.mark.kernel

PORT = 8080
FLOOD = 1_000_000


@pytest.fixture
def events(loaded: loader.Loaded) -> Iterator[DropEventReader]:
    """The ring, empty."""
    made = DropEventReader(loaded)
    budget = loaded.map(map_specs.PACKET_BUDGET)
    budget.set(bytes(4), bytes(budget.value_size))
    made.read()
    yield made
    made.close()


@pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.ENFORCE])
def test_flood_is_counted_completely_and_reported_in_part(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, events: DropEventReader, mode: Mode
) -> None:
    pod = lab.add_pod("flooded", 1)
    gates.install(pod.ifindex, GateConfig(mode, pod.addresses))
    counting = Counting(gates, pod.ifindex)
    ends = frames.Ends(frames.address("198.18.0.1"), frames.address(pod.ipv4))
    syn = frames.segment(ends, frames.SYN)
    untold_before = events.lost()
    began_ns = time.monotonic_ns()
    syscalls.run_program(
        loaded.programs[program_specs.GATE_EGRESS], syn, skb.context(pod.ifindex, 0), FLOOD
    )
    took_ns = time.monotonic_ns() - began_ns
    told = events.read()
    verdict = Verdict.DROP if mode is Mode.ENFORCE else Verdict.WOULD_DROP
    assert counting.moved()[verdict, Reason.NODE] == FLOOD
    assert len(told) + events.lost() - untold_before == FLOOD
    # 16 for each tenth of a second, and the test run is on one CPU at a time.
    windows = took_ns / 1e8 + 2
    assert 0 < len(told) <= 16 * windows * (os.cpu_count() or 1)
    assert {(one.verdict, one.reason, one.ifindex) for one in told} == {
        (verdict, Reason.NODE, pod.ifindex)
    }
    assert {str(one.destination) for one in told} == {pod.ipv4}


def test_flooded_copies_send_no_events(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, events: DropEventReader
) -> None:
    pod = lab.add_pod("neighbour", 1)
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    ends = frames.Ends(frames.address("198.18.0.1"), frames.address("198.18.1.99"))
    syscalls.run_program(
        loaded.programs[program_specs.GATE_EGRESS],
        frames.segment(ends, frames.SYN),
        skb.context(pod.ifindex, 0),
    )
    assert events.read() == []


def test_drops_follow_names_the_process(operator: AgentProcess, lab: labs.Lab) -> None:
    offers.need_netns_cookie()  # gates know it only since Linux 6.16, hooks do
    web = lab.add_pod("web", 1)
    operator.write_manifest(web, mode="enforce", container={})
    operator.start()
    operator.wait_for(
        "the gate", lambda report: any(pod.gates and pod.name == "web" for pod in report.pods)
    )
    with following(operator) as text, following(operator, "--output", "json") as documents:
        line, document = "", ""
        # Both start with the events after their first request.
        while not (line and document):
            observed = attempts.connect_from_node(web, "IPv4", PORT, is_rejected=True)
            assert observed in (attempts.REFUSED, attempts.DROPPED)
            line = line or next_line(text)
            document = document or next_line(documents)
    source = rf"drop \(node\) \S+\[{os.getpid()}\] in \S+"
    assert re.search(rf"{source}.* -> demo/web tcp {PORT}$", line.rstrip())
    told = json.loads(document)
    assert (told["pod"], told["reason"], told["process"]) == ("web", "node", os.getpid())


@contextlib.contextmanager
def following(operator: AgentProcess, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = (sys.executable, "-m", "agent", "drops", "--follow", *arguments)
    process = subprocess.Popen(
        [*command, "--run-directory", str(operator.run_directory)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def next_line(process: "subprocess.Popen[str]") -> str:
    """What has been printed within a tenth of a second, or nothing."""
    assert process.stdout is not None
    assert process.poll() is None
    ready, _, _ = select.select([process.stdout], [], [], 0.1)
    return process.stdout.readline() if ready else ""
