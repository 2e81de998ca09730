"""What the gate costs: bench `gate`. Every comparison is interleaved within one run.

Single packets are timed in tests/bench/packets.py. Traffic is real: TCP between two pods over the
node and within the node, with podgate and without, in turn.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from agent.lab import lab as labs
from agent.lab.lab import BPFFS, Lab, LabPod
from agent.linux.cgroups import cgroup2_mount
from bpf import loader, pins
from bpf.gates import Attachment, Counts, GateConfig, Gates
from bpf.hooks import Hooks
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode, Reason, Verdict
from probes.netns import netns_cookie
from tests.bench import figures, packets, rates
from tests.bench.crowd import Crowd
from tests.kernel import frames, links, questions, traffic
from tests.kernel.reply_tables import start_reply_table

_PAIRS = 20
_FEW, _MANY = 10, 1_000
_ANSWERS, _OUTSTANDING = 100_000, 1_000
# For each question: 50,000 a second, while 2,000 questions a second wait half a second each.
_CLIENTS = 25

# What one writes who closes the hole with nftables: node to pod is dropped, answers pass.
_NO_RULE_SET = "table inet hole\ndelete table inet hole\n"
_RULE_SET = """
table inet hole {
    chain output {
        type filter hook output priority filter; policy accept;
        ct state established,related accept
        meta oifkind "veth" drop
    }
}
"""


def main() -> None:
    labs.isolate()
    with Lab() as network:
        installation = pins.Pins(BPFFS)
        loaded = asyncio.run(loader.load(installation))
        try:
            _note("a packet's time, as a ratio to an empty program's")
            packets.measure(loaded, installation)
            _note("policy_250_pods_ms")
            packets.measure_policies(loaded, installation)
            packets.emit_memory()
            podgate = Podgate(loaded, installation)
            _replies(network, podgate)
            _traffic(network, podgate)
            podgate.close()
        finally:
            loaded.close()
            installation.remove_everything()


def _replies(network: Lab, podgate: "Podgate") -> None:
    """The worst of both layouts and families, and each of them."""
    _note(f"answers lost of {_ANSWERS} while {_OUTSTANDING} are outstanding")
    lost, beside_clients = {}, {}
    for number, layout in enumerate(("routed", "bridged"), 3):
        pod = network.add_pod(f"{layout}-asker", number, bridged=layout == "bridged")
        if pod.is_bridged:
            links.wait_for_port(pod.interface)
        for version in (4, 6):
            name = f"{layout}_ipv{version}"
            lost[name] = _lost_replies(podgate, pod, version, _ANSWERS)
            beside_clients[name] = _lost_replies(podgate, pod, version, _ANSWERS // 4, _CLIENTS)
    figures.emit("gate", "reply_loss_ppm", [max(lost.values())], "ppm", parts=lost)
    figures.emit(
        *("gate", "reply_loss_beside_clients_ppm", [max(beside_clients.values())], "ppm"),
        parts=beside_clients,
    )


def _lost_replies(
    podgate: "Podgate", pod: LabPod, version: int, answers: int, clients: int = 0
) -> float:
    """Of a million, from a new reply table. clients: of the pod's own server, for each question."""
    podgate.pods = (pod,)
    podgate.put_on()
    with socket.socket(traffic.family(version), socket.SOCK_DGRAM) as server:
        server.settimeout(traffic.LIMIT_SECONDS)
        server.bind(("", 0))
        answered = questions.send(
            *(pod, server, version),
            total=answers + _OUTSTANDING,
            outstanding=_OUTSTANDING,
            clients=clients,
        )
    passed = podgate.counts()[pod.ifindex][Verdict.PASS, Reason.REPLY]
    podgate.take_off()
    return (answered - passed) / answered * 1e6


def _traffic(network: Lab, podgate: "Podgate") -> None:
    server, client = network.add_pod("server", 1), network.add_pod("client", 2)
    podgate.pods = (server, client)

    def request_rate() -> float:
        return rates.request_rate(client, server.ipv4)

    with rates.serving(server):
        for figure, measure in (
            ("throughput", lambda: rates.throughput(client, server.ipv4)),
            ("request_rate", request_rate),
            (
                "connect_rate",
                lambda: rates.connect_rate(rates.pod_socket(client), server.ipv4),
            ),
            ("node_connect_rate", lambda: rates.connect_rate(rates.node_socket, "127.0.0.1")),
        ):
            _note(f"{figure}, with podgate and without in turn")
            _compare(figure, measure, podgate.put_on, podgate.take_off, "ratio to no podgate")

        _note(f"request_rate_1000_pods, among {_MANY} gated interfaces and among {_FEW} in turn")
        podgate.put_on()
        with Crowd(_MANY) as crowd:
            few, rest = crowd.ifindexes[:_FEW], crowd.ifindexes[_FEW:]
            podgate.gate(few)
            _compare(
                "request_rate_1000_pods",
                request_rate,
                lambda: podgate.gate(rest),
                lambda: podgate.release(rest),
                f"ratio to {_FEW} pods",
            )
            podgate.release(few)
        podgate.take_off()

        _note("nft_request_rate, podgate and an nftables rule set in turn")

        def swap_to_podgate() -> None:
            nftables(_NO_RULE_SET)
            podgate.put_on()

        def swap_to_nftables() -> None:
            podgate.take_off()
            nftables(_NO_RULE_SET + _RULE_SET)

        nftables(_RULE_SET)
        _compare(
            "nft_request_rate",
            request_rate,
            swap_to_podgate,
            swap_to_nftables,
            "ratio to an nftables rule set",
        )
        nftables(_NO_RULE_SET)


class Podgate:
    """Gates of the pods, and the hooks at the root cgroup, to be put on and taken off."""

    def __init__(self, loaded: loader.Loaded, installation: pins.Pins) -> None:
        mount = cgroup2_mount()
        assert mount is not None
        self.pods: tuple[LabPod, ...] = ()
        self._gates = Gates(loaded, installation, Attachment.CLSACT)
        self._hooks = Hooks(loaded, installation, mount)
        NodeConfig(loaded).set_netns(netns_cookie())

    def put_on(self) -> None:
        self._hooks.attach()
        for pod in self.pods:
            self._gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
            start_reply_table(self._gates, pod.ifindex)

    def take_off(self) -> None:
        self._hooks.detach()
        self.release([pod.ifindex for pod in self.pods])

    def gate(self, ifindexes: Sequence[int]) -> None:
        """Gates of interfaces without listeners, each with its own addresses."""
        for ifindex in ifindexes:
            address = frames.address(f"198.19.{ifindex >> 8 & 255}.{ifindex & 255}")
            self._gates.install(ifindex, GateConfig(Mode.ENFORCE, (address,)))

    def release(self, ifindexes: Sequence[int]) -> None:
        for ifindex in ifindexes:
            self._gates.remove(ifindex)

    def counts(self) -> Mapping[int, Counts]:
        return self._gates.counts()

    def close(self) -> None:
        self._gates.close()


def _compare(
    figure: str,
    measure: Callable[[], float],
    put_on: Callable[[], None],
    take_off: Callable[[], None],
    unit: str,
) -> None:
    """Ratios of with over without, each from two neighbouring measurements.

    Which of them comes first alternates, so that what a change costs the next moment, and what the
    machine drifts by, falls on both.
    """
    ratios = []
    for turn in range(_PAIRS):
        rates_of_pair = {}
        for is_on in (turn % 2 == 0, turn % 2 == 1):
            (put_on if is_on else take_off)()
            measure()
            rates_of_pair[is_on] = measure()
        ratios.append(rates_of_pair[True] / rates_of_pair[False])
    take_off()
    figures.emit("gate", figure, ratios, unit)


def nftables(script: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
