"""How long a new pod is open to the node, with the default-deny table and without: `python -m
tests.bench.default_deny`.

From when the pod listens, a process of the node tries new connections, one after the other, for the
20 ms that an agent may need to attach the gate.
"""

import asyncio
import errno
import select
import socket
import time

from agent.default_deny.table import DefaultDenyTable
from agent.lab import lab as labs
from agent.lab.lab import Lab, LabPod
from tests.bench import figures

_RUNS = 20
_GATE_AFTER_SECONDS = 0.02
_ANSWER_MS = 1
_BURST = 200


def main() -> None:
    labs.isolate()
    opened: dict[bool, list[float]] = {True: [], False: []}
    with Lab() as network, asyncio.Runner() as runner:
        for number in range(1, _RUNS + 1):
            for with_table in (True, False):
                table = runner.run(DefaultDenyTable.open()) if with_table else None
                assert table is None or table.available, table
                pod = network.add_pod("web", number)
                with pod.listen(80):
                    opened[with_table].append(_opened(pod))
                network.remove_pod("web")
                if table is not None:
                    runner.run(table.remove())
        figures.emit(
            "default_deny", "connections_before_gate", opened[True], "count", baseline=opened[False]
        )
        table = runner.run(DefaultDenyTable.open())
        one = [_timed(runner, table, range(n, n + 1)) for n in range(1000, 1000 + _RUNS)]
        figures.emit("table", "gate_one_ms", one, "ms")
        burst = [
            _timed(runner, table, range(n, n + _BURST))
            for n in range(2000, 2000 + _BURST * _RUNS, _BURST)
        ]
        figures.emit("table", f"gate_{_BURST}_ms", burst, "ms")
        runner.run(table.remove())


def _opened(pod: LabPod) -> float:
    """How many connections were made before the gate would have been there."""
    poll = select.poll()
    attempts: dict[int, socket.socket] = {}
    made = 0
    deadline = time.monotonic() + _GATE_AFTER_SECONDS
    while time.monotonic() < deadline:
        sock = socket.socket()
        sock.setblocking(False)
        attempts[sock.fileno()] = sock
        if sock.connect_ex((pod.ipv4, 80)) == errno.EINPROGRESS:
            poll.register(sock, select.POLLOUT)
        for number, events in poll.poll(_ANSWER_MS):
            made += events == select.POLLOUT
            poll.unregister(number)
    for sock in attempts.values():
        sock.close()
    return made


def _timed(runner: asyncio.Runner, table: DefaultDenyTable, ifindexes: range) -> float:
    async def gate() -> None:
        await asyncio.gather(*(table.gate([ifindex]) for ifindex in ifindexes))

    started = time.perf_counter()
    runner.run(gate())
    return (time.perf_counter() - started) * 1000


if __name__ == "__main__":
    main()
