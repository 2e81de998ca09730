"""Calls for which the kernel takes its time: they wait for a lock of its own that another program
holds (RTNL, for as long as that changes interfaces), and no program can end the wait."""

import socket
import time
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab
from agent.linux.nft import NETLINK_NETFILTER
from bpf import pins
from tests.faults import node as nodes
from tests.faults.injector import Rule
from tests.faults.node import BEAT_SECONDS, Node
from tests.kernel.conftest import installed, installed_pins, operator
from tests.polling import wait_until

__all__ = ["installed", "installed_pins", "operator"]

pytestmark = pytest.mark.kernel

# Longer than a heartbeat may be old, and shorter than the agent's own limits.
_WAIT_SECONDS = 1.5 * BEAT_SECONDS
# Of linux/bpf.h: PROG_ATTACH, PROG_DETACH, PROG_QUERY, LINK_CREATE, LINK_UPDATE and LINK_DETACH.
_OF_INTERFACES = (8, 9, 16, 28, 29, 34)
# sock_diag, which the event loop calls, takes none of them: while others held RTNL for 100 ms at a
# time, rtnetlink waited for up to 103 ms, and sock_diag for 3 (Linux 6.18).
_LOCKED_PROTOCOLS = (socket.NETLINK_ROUTE, NETLINK_NETFILTER)
_SLOW = {
    "netlink": Rule(
        *(("sendto",), 0),
        family="NETLINK",
        protocols=_LOCKED_PROTOCOLS,
        process="agent",
        seconds=_WAIT_SECONDS,
    ),
    "bpf": Rule(("bpf",), 0, process="agent", seconds=_WAIT_SECONDS, commands=_OF_INTERFACES),
}


@pytest.fixture
def node(lab: Lab, operator: AgentProcess, installed_pins: pins.Pins) -> Iterator[Node]:
    with nodes.running(lab, operator, installed_pins) as made:
        yield made


def test_heartbeat_waits_for_no_lock_of_the_kernel(node: Node) -> None:
    for name, rule in _SLOW.items():
        node.injector.failed()
        node.heartbeat.take()
        with node.injector.failing(rule):
            for mode in ("", "strict"):
                node.add(mode)
            wait_until(f"calls of {name} that wait", node.injector.failed)
            time.sleep(_WAIT_SECONDS)
        assert node.heartbeat.take() < BEAT_SECONDS, name
        node.operator.wait_for("all as before", lambda report: not node.lacks(report))
