"""A short notation for slices, and for what is published of their endpoints.

An endpoint is "1.2", the last two numbers of its address. "*1.2": on this node. After it "!": not
serving; "~": terminating, "~!": both. A slice is its endpoints and ports, "1.1 *1.2! : p11/11
p12/12"; a port without a number, "p11/", has none, and "p11/11/UDP" has a protocol. Slices are
"namespace/service-number".

What is published of a port is "1.2:80", with the same signs.
"""

import re
from collections.abc import Iterable, Mapping

from agent.services.api import objects
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.agent.api.upstream.families import Family
from tests.agent.api.upstream.node import Synced
from tests.agent.services.api import making
from tests.agent.services.api.making import NODE, Json

Published = dict[str, str]
"""The endpoints of each "namespace/service:port"; ports without endpoints are left out."""


def endpoint_slice(
    name: str, text: str, family: Family, *, protocol: str = "UDP", kind: str = ""
) -> objects.EndpointSlice:
    """kind: an addressType that is not the family's."""
    namespace, _, slice_name = name.partition("/")
    endpoints, _, ports = text.partition(":")
    made = making.slice_json(
        *(_endpoint(word, family) for word in endpoints.split()),
        name=slice_name,
        service=slice_name.rpartition("-")[0],
        family=kind or family.name,
        ports=[_port(word, protocol) for word in ports.split()],
    )
    made["metadata"]["namespace"] = namespace
    found: objects.EndpointSlice = making.read(made, objects.EndpointSlice)
    return found


def services(slices: Iterable[objects.EndpointSlice], family: Family) -> list[objects.ApiService]:
    """A service with a cluster IP for all ports of its slices."""
    ports: dict[tuple[str, str], dict[str, Json]] = {}
    for one in slices:
        of_service = ports.setdefault((one.metadata.namespace, one.service), {})
        for port in one.ports or ():
            assert port.name is not None
            # In kube-proxy's cases no two ports of a service differ in the protocol alone.
            number = 1000 + len(of_service)
            of_service.setdefault(
                port.name, {"name": port.name, "protocol": port.protocol, "port": number}
            )
    made = []
    for index, ((namespace, name), of_service) in enumerate(ports.items(), start=1):
        address = family.of(f"198.18.96.{index}")
        service = making.service_json(
            name, clusterIP=address, clusterIPs=[address], ports=list(of_service.values())
        )
        service["metadata"]["namespace"] = namespace
        made.append(making.read(service, objects.ApiService))
    return made


def published(synced: Synced) -> dict[str, set[str]]:
    """Each port's endpoints with their conditions, for those that have any.

    Checked on the way: those that proxies get by default are the ready ones, or else those that
    still serve.
    """
    found = {
        f"{name}:{port.name}": {_shown(one) for one in port.endpoints}
        for name, service in synced.everything.items()
        for port in service.ports
        if port.endpoints
    }
    for name, service in synced.services.items():
        for port in service.ports:
            words = found.get(f"{name}:{port.name}", set())
            ready = {word for word in words if word[-1].isdigit()}
            used = ready or {word for word in words if word[-1] == "~"}
            assert {_address(one) for one in port.endpoints} == {word.strip("*~") for word in used}
            assert all(one.is_terminating is not bool(ready) for one in port.endpoints)
    return found


def words(published: Mapping[str, str]) -> dict[str, set[str]]:
    """As `published` has it."""
    return {port: set(text.split()) for port, text in published.items()}


def at_port(endpoints: str, port: int) -> str:
    """What is published of them."""
    return " ".join(re.sub(r"(\d+\.\d+)", rf"\1:{port}", word) for word in endpoints.split())


def _endpoint(word: str, family: Family) -> Json:
    address = word.strip("*~!")
    return making.endpoint_json(
        family.of(f"198.19.{address}"),
        node=NODE if word.startswith("*") else "other",
        ready=address == word.lstrip("*"),
        serving=not word.endswith("!"),
        terminating="~" in word,
    )


def _port(word: str, protocol: str) -> Json:
    name, number, *own = word.split("/")
    return {"name": name, "protocol": (*own, protocol)[0], "port": int(number) if number else None}


def _shown(endpoint: pb.Endpoint) -> str:
    conditions = endpoint.conditions
    assert conditions.ready is (conditions.serving and not conditions.terminating)
    signs = "~" * conditions.terminating + "!" * (not conditions.serving)
    return f"{'*' * endpoint.is_local}{_address(endpoint)}{signs}"


def _address(endpoint: pb.Endpoint) -> str:
    """Of the tables, back from that of a family."""
    numbers = endpoint.address.replace(":", ".").split(".")[-2:]
    return f"{'.'.join(numbers)}:{endpoint.port}"
