"""nftables rules in the place of kube-proxy's, for services with one endpoint."""

from collections.abc import Iterator

from tests.cluster.api import Json
from tests.cluster.control_plane import PORT, SERVICE_ADDRESS
from tests.cluster.deployment import NAMESPACE
from tests.cluster.machine import Machine
from tests.cluster.several_nodes import OUTSIDE, POD_NETWORKS, SeveralNodes

_TABLE = "test-services"
_MARK = "0x4000"
"""Of connections that get the node's address, as kube-proxy's."""


class ServiceRules:
    """Of one cluster. `update` after services and their endpoints exist."""

    def __init__(self, cluster: SeveralNodes) -> None:
        self._cluster = cluster

    def start(self) -> None:
        """The API server's service only."""
        for machine in self._cluster.machines:
            self._write(machine)

    def update(self) -> None:
        self.start()

    def restart(self, name: str) -> None:
        """The rules of one node are replaced."""
        self._write(self._cluster.machine(name))

    def _write(self, machine: Machine) -> None:
        file = machine.directory / "services.nft"
        translations = "\n".join(self._translations(machine))
        chains = "".join(
            f"chain {hook} {{ type nat hook {hook} priority -100;\n{translations}\n}}\n"
            for hook in ("output", "prerouting")
        )
        file.write_text(
            f"table inet {_TABLE} {{}}\ndelete table inet {_TABLE}\ntable inet {_TABLE} {{\n"
            f"{chains}chain postrouting {{ type nat hook postrouting priority 100;\n"
            f"meta mark & {_MARK} == {_MARK} masquerade\n{_to_outside()}\n}}\n}}\n"
        )
        machine.run("nft", "-f", str(file))

    def _translations(self, machine: Machine) -> Iterator[str]:
        yield f"ip daddr {SERVICE_ADDRESS} tcp dport {PORT} dnat ip to {OUTSIDE[0]}:{PORT}"
        for service in self._cluster.api.items("/api/v1/services"):
            # podgate's own has names of ports and several endpoints, and nothing needs it here.
            if service["spec"].get("selector") and service["metadata"]["namespace"] != NAMESPACE:
                for pod in self._endpoints(service):
                    yield from _of_service(machine, service, pod)

    def _endpoints(self, service: Json) -> list[Json]:
        path = f"/api/v1/namespaces/{service['metadata']['namespace']}/pods"
        labels = ",".join(f"{key}={value}" for key, value in service["spec"]["selector"].items())
        pods = self._cluster.api.items(path, labelSelector=labels)
        return [pod for pod in pods if pod["status"].get("podIPs")]


def _to_outside() -> str:
    """Pods' addresses are known to nodes only, as with flannel's `--ip-masq`."""
    return "\n".join(
        f"{family} saddr {pods} {family} daddr != {pods} masquerade"
        for family, pods in zip(("ip", "ip6"), POD_NETWORKS, strict=True)
    )


def _of_service(machine: Machine, service: Json, pod: Json) -> Iterator[str]:
    """kube-proxy masquerades what comes by a node port, unless its policy is Local, and what a pod
    sends to itself."""
    spec = service["spec"]
    is_local = spec.get("externalTrafficPolicy") == "Local"
    is_here = pod["spec"]["nodeName"] == machine.name
    for address in (one["ip"] for one in pod["status"]["podIPs"]):
        family = "ip6" if ":" in address else "ip"
        same = [one for one in spec["clusterIPs"] if (":" in one) == (":" in address)]
        if not same:  # a service of the other family alone
            continue
        to = f"[{address}]" if ":" in address else address
        for port in spec["ports"]:
            protocol = port["protocol"].lower()
            then = f"dnat {family} to {to}:{port['targetPort']}"
            mark = f"meta mark set meta mark | {_MARK}"
            match = f"{family} daddr {same[0]} {protocol} dport {port['port']}"
            yield f"{match} {family} saddr {address} {mark} {then}"
            yield f"{match} {then}"
            nfproto = "ipv6" if ":" in address else "ipv4"
            by_node = f"meta nfproto {nfproto} fib daddr type local {protocol} dport"
            if "nodePort" not in port:
                continue
            if not is_local:
                yield f"{by_node} {port['nodePort']} {mark} {then}"
            elif is_here:
                yield f"{by_node} {port['nodePort']} {family} saddr {address} {mark} {then}"
                yield f"{by_node} {port['nodePort']} {then}"
