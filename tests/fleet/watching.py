"""Continuous connects while a test changes the cluster; enforce or strict is in force."""

import pathlib

from tests.cluster.several_nodes import SeveralNodes
from tests.fleet.workload import Fleet
from tests.networks.traffic import Path, addresses


def paths(cluster: SeveralNodes, fleet: Fleet) -> list[Path]:
    """Of each node's processes to the node's own server (closed) and to the others (open), and of
    each node's client to all servers (open)."""
    servers = {web.node: addresses(fleet.shop.pod(web.name)) for web in fleet.webs}
    found = []
    for machine in cluster.machines:
        name, own = machine.name, netns(machine.pid)
        others = [ip for node, ips in servers.items() if node != name for ip in ips]
        everywhere = [ip for ips in servers.values() for ip in ips]
        client = fleet.clients.pod(f"client-{name}")
        (pid, *_) = machine.containers_of(client["metadata"]["uid"])
        found += [
            Path(f"{name} to its own", is_open=False, addresses=servers[name], netns=own),
            Path(f"{name} to others", is_open=True, addresses=others, netns=own),
            Path(f"client of {name}", is_open=True, addresses=everywhere, netns=netns(pid)),
        ]
    return found


def netns(pid: int) -> pathlib.Path:
    return pathlib.Path(f"/proc/{pid}/ns/net")
