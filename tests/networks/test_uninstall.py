"""podgate goes, and the network plugin is what it was. The last tests of a run."""

import socket
import subprocess
from collections.abc import Callable

import pytest

from bpf import syscalls
from tests import polling
from tests.cluster import workloads
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.plugin import Plugin
from tests.cluster.workloads import PORT, Workloads
from tests.image.node import BPFFS
from tests.networks import traffic, workload
from tests.networks.network import Network
from tests.networks.storms import storm

pytestmark = pytest.mark.kernel


def interfaces(podgate: Deployment, users: Workloads) -> list[str]:
    """Of these pods. Those of previous tests may go at any time."""
    report = podgate.report()
    assert report is not None
    found = {
        gate.interface
        for pod in report.pods
        if pod.namespace == users.namespace
        for gate in pod.gates
    }
    assert len(found) == len(users.pods())
    return sorted(found)


def rules(names: list[str]) -> dict[str, int]:
    """How many rules each rule set has for these interfaces or addresses."""
    commands = {
        "iptables": ("iptables-save",),
        "ip6tables": ("ip6tables-save",),
        "nftables": ("nft", "list", "ruleset"),
    }
    found = {}
    for name, command in commands.items():
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        found[name] = sum(any(map(line.__contains__, names)) for line in done.stdout.splitlines())
    return found


def programs(names: list[str]) -> dict[str, int]:
    """How many programs each of these interfaces has, without podgate's."""
    found = {}
    for interface in names:
        ifindex = socket.if_nametoindex(interface)
        ids = [
            one
            for where in (syscalls.BPF_TCX_INGRESS, syscalls.BPF_TCX_EGRESS)
            for one in syscalls.query_programs(ifindex, where)
        ]
        linked = sum(not syscalls.program_name(one).startswith("gate_") for one in ids)
        found[interface] = linked + len(traffic.filters(interface))
    return found


def test_uninstall_in_strict_leaves_the_network_plugin_alone(
    network: Network, node: OneNode, podgate: Deployment, namespaces: Namespaces, plugin: Plugin
) -> None:
    users = namespaces("strict")
    pods = workload.run(users)
    names = interfaces(podgate, users)
    marks = [*names, *(one for pod in pods.values() for one in traffic.addresses(pod))]
    before = rules(marks), programs(names)
    if network.has_programs:
        assert all(before[1].values())
    else:
        assert any(before[0].values())
    engine = network.engine.pid
    status, output = plugin.run("uninstall", "--yes", "--labels=keep")
    assert status == 0, (output, plugin.errors)
    assert "podgate is removed." in output
    polling.wait_until("podgate's pins are gone", lambda: not (BPFFS / "podgate").exists())
    assert (rules(marks), programs(names)) == before
    assert network.engine.pid == engine
    network.wait_until_ready()
    client = traffic.netns_of(pods["client"])
    for address in traffic.addresses(pods["web"]):
        assert traffic.dial(address) == ""
        assert traffic.dial(address, PORT, client) == ""
    assert workload.harm(users) == ""


def test_storm_without_podgate(
    network: Network, bare_cluster: OneNode, record_property: Callable[[str, object], None]
) -> None:
    """For comparison: what the same storm costs by itself."""
    assert not bare_cluster.api.find("/api/v1/namespaces/podgate")
    with workloads.namespace(bare_cluster.api, "storm-without-podgate") as users:
        users.run("web", workloads.PROBED)
        users.run("tcp", workload.TCP)
        users.run("client")
        pods = dict(
            zip(("web", "tcp", "client"), users.until_ready("web", "tcp", "client"), strict=True)
        )
        record_property("figures", storm(network, bare_cluster, users, pods, None).summary)
