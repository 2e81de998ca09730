"""The pods of one namespace, and who reaches them."""

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

from tests import polling
from tests.cluster.api import Api, Json
from tests.cluster.workloads import ISOLATION_READY, PORT, PROBED, WEB, Workloads, condition
from tests.networks import traffic
from tests.networks.network import Network

SERVICE_IPV4, SERVICE_IPV6 = "198.18.200.80", "fd00:18:200::50"
SERVICE_PORT = 80
_TABLE = "test-service"
_TCP_PROBE: Json = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
TCP: Json = {
    **WEB,
    "startupProbe": {**_TCP_PROBE, "failureThreshold": 30},
    "readinessProbe": _TCP_PROBE,
    "livenessProbe": _TCP_PROBE,
}
"""Its probes connect only."""
NEVER_READY: Json = {
    **WEB,
    "readinessProbe": {"httpGet": {"path": "/missing", "port": PORT}, "periodSeconds": 1},
}
"""Its server is right to fail."""


def run(users: Workloads) -> dict[str, Json]:
    """Pods with HTTP and TCP probes, a client without, and one whose probe fails; by name."""
    users.run("web", PROBED, gates=(ISOLATION_READY,))
    users.run("tcp", TCP, gates=(ISOLATION_READY,))
    users.run("client", gates=(ISOLATION_READY,))
    users.run("sick", NEVER_READY)
    isolated = users.until_isolated("web", "tcp", "client")
    return dict(zip(("web", "tcp", "client"), isolated, strict=True))


def harm(users: Workloads) -> str:
    """What no healthy pod may have; empty if nothing."""
    if unhealthy := [one for one in users.unhealthy() if not _is_expected(one)]:
        return f"failed probes: {unhealthy}"
    return lasting_harm(users)


def lasting_harm(users: Workloads) -> str:
    """Of it, what a probe that failed once is not."""
    if restarts := users.restarts():
        return f"restarts: {restarts}"
    unready = [
        pod["metadata"]["name"]
        for pod in users.pods()
        if pod["metadata"]["name"] != "sick" and condition(pod, "Ready").get("status") != "True"
    ]
    return f"not ready: {unready}" if unready else ""


def _is_expected(message: str) -> bool:
    # A server that has not bound its port yet fails the startup probe.
    return message.startswith("sick: ") or "Startup probe failed" in message


@contextlib.contextmanager
def service(network: Network, users: Workloads, pod: Json) -> Iterator[None]:
    """A service of this pod, with an address of each family; the network translates it, or a rule
    set in kube-proxy's place."""
    made = _create(network.api, users)
    rules = "" if network.translates else _rules(pod)
    if rules:
        subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True, timeout=30)
    try:
        client = traffic.netns_of(users.pod("client"))
        polling.wait_until(
            "the service translates", lambda: not traffic.dial(SERVICE_IPV4, SERVICE_PORT, client)
        )
        yield
    finally:
        network.api.delete(made)
        if rules:
            subprocess.run(["nft", "delete", "table", "inet", _TABLE], check=True, timeout=30)


def _create(api: Api, users: Workloads) -> str:
    path = f"/api/v1/namespaces/{users.namespace}/services"
    spec: dict[str, Any] = {
        "selector": {"app": "web"},
        "ipFamilyPolicy": "PreferDualStack",
        "clusterIP": SERVICE_IPV4,
        "clusterIPs": [SERVICE_IPV4, SERVICE_IPV6],
        "ports": [{"port": SERVICE_PORT, "targetPort": PORT}],
    }
    api.create(path, {"metadata": {"name": "web"}, "spec": spec})
    return f"{path}/web"


def _rules(pod: Json) -> str:
    translations = "".join(
        f"ip6 daddr {SERVICE_IPV6} tcp dport {SERVICE_PORT} dnat ip6 to [{address}]:{PORT}\n"
        if ":" in address
        else f"ip daddr {SERVICE_IPV4} tcp dport {SERVICE_PORT} dnat ip to {address}:{PORT}\n"
        for address in traffic.addresses(pod)
    )
    chains = "".join(
        f"chain {hook} {{ type nat hook {hook} priority -100;\n{translations}}}\n"
        for hook in ("output", "prerouting")
    )
    return f"table inet {_TABLE} {{\n{chains}}}\n"
