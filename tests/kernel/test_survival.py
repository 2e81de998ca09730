"""A gate stays attached when the process that attached it is killed."""

import signal
import subprocess
import sys

import pytest

from agent.lab import lab as labs
from bpf import pins
from bpf.gates import Attachment
from tests.kernel import offers, traffic

pytestmark = pytest.mark.kernel

_INSTALL = """
import asyncio, sys, time
from bpf import gates, loader, pins
from bpf.abi import ipaddress
from bpf.verdicts import Mode
bpffs, kind, ifindex, *addresses = sys.argv[1:]
installation = pins.Pins(bpffs)
made = gates.Gates(
    asyncio.run(loader.load(installation)), installation, gates.Attachment(kind)
)
own = tuple(map(ipaddress.ip_address, addresses))
made.install(int(ifindex), gates.GateConfig(Mode.ENFORCE, own))
print("installed", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", list(Attachment))
def test_gate_outlives_a_killed_process(
    lab: labs.Lab, fresh_pins: pins.Pins, kind: Attachment
) -> None:
    if kind is Attachment.TCX:
        offers.need_tcx()
    pod = lab.add_pod("web", 1)
    addresses = [str(address) for address in pod.addresses]
    arguments = [str(fresh_pins.bpffs), kind.value, str(pod.ifindex), *addresses]
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)
        child = subprocess.Popen(
            [sys.executable, "-c", _INSTALL, *arguments], stdout=subprocess.PIPE
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"installed\n"
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        assert traffic.node_is_dropped(pod, 4)
        assert traffic.node_is_dropped(pod, 6)
