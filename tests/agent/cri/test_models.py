"""What a runtime's responses mean, field by field."""

import datetime
import ipaddress
import json
import pathlib
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format

from agent.cri import containerd_pb2, models, runtime_pb2
from agent.cri.models import (
    CriContainer,
    CriContainerState,
    NetworkedSandbox,
    Sandbox,
    SandboxDetails,
)
from probes.netns import Netns

IPV4, IPV6 = ipaddress.ip_address("198.18.1.1"), ipaddress.ip_address("fd00::1")
NANOSECONDS = 1_767_225_600_500_000_000
CREATED = datetime.datetime(2026, 1, 1, 0, 0, 0, 500_000, tzinfo=datetime.UTC)

SANDBOX = {
    "id": "0123456789abcdef",
    "metadata": {"name": "web", "uid": "u", "namespace": "shop", "attempt": 2},
    "state": "SANDBOX_READY",
    "createdAt": str(NANOSECONDS),
    "runtimeHandler": "kata",
}
READ = Sandbox(
    id="0123456789abcdef",
    pod_uid="u",
    pod_name="web",
    pod_namespace="shop",
    attempt=2,
    created=CREATED,
    runtime_handler="kata",
    is_ready=True,
)


def test_sandboxes_of_pods_are_read() -> None:
    others = [
        SANDBOX | {"id": "stopped", "state": "SANDBOX_NOTREADY", "createdAt": "0"},
        SANDBOX | {"id": ""},
        # Not the kubelet's.
        SANDBOX | {"metadata": {"name": "web"}},
    ]
    response = runtime_pb2.ListPodSandboxResponse()
    json_format.ParseDict({"items": [SANDBOX, *others]}, response)
    stopped = msgspec.structs.replace(READ, id="stopped", is_ready=False, created=None)
    assert models.decode_sandboxes(response) == [READ, stopped]
    assert (READ.short_id, READ.full_name) == ("0123456789ab", "shop/web")


def test_later_sandbox_of_a_pod_is_the_newer_one() -> None:
    again = msgspec.structs.replace(READ, attempt=3, created=None)
    later = msgspec.structs.replace(READ, created=CREATED + datetime.timedelta(seconds=1))
    unknown = msgspec.structs.replace(READ, created=None)
    ordered = sorted([again, READ, later, unknown], key=lambda one: one.age_order)
    assert ordered == [unknown, READ, later, again]


def test_sandbox_has_a_namespace_while_that_exists(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "ns"
    file.touch()
    found = file.stat()
    netns = Netns(str(file), found.st_dev, found.st_ino)
    sandbox = msgspec.structs.replace(READ, netns=netns)
    existed = sandbox.has_netns
    file.unlink()
    assert (existed, sandbox.has_netns, READ.has_netns) == (True, False, False)


@pytest.mark.parametrize("network", ["NODE", "POD"])
def test_details_of_a_sandbox_are_read_without_addresses_that_are_none(network: str) -> None:
    response = runtime_pb2.PodSandboxStatusResponse()
    json_format.ParseDict(
        {
            "status": {
                "network": {
                    "ip": str(IPV4),
                    "additionalIps": [{"ip": "none"}, {"ip": str(IPV6)}],
                },
                "linux": {"namespaces": {"options": {"network": network}}},
            },
            "info": {"info": "{}"},
        },
        response,
    )
    assert models.decode_details(response) == SandboxDetails(
        host_network=network == "NODE", ips=(IPV4, IPV6), info={"info": "{}"}
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (runtime_pb2.CONTAINER_CREATED, CriContainerState.CREATED),
        (runtime_pb2.CONTAINER_RUNNING, CriContainerState.RUNNING),
        (runtime_pb2.CONTAINER_EXITED, CriContainerState.EXITED),
        (runtime_pb2.CONTAINER_UNKNOWN, CriContainerState.UNKNOWN),
    ],
)
def test_containers_of_sandboxes_are_read(state: Any, expected: CriContainerState) -> None:
    response = runtime_pb2.ListContainersResponse()
    container = {
        "id": "c",
        "podSandboxId": "s",
        "metadata": {"name": "app", "attempt": 4},
        "createdAt": str(NANOSECONDS),
    }
    others = [container | {"id": ""}, container | {"podSandboxId": ""}]
    json_format.ParseDict({"containers": [container, *others]}, response)
    response.containers[0].state = state
    assert models.decode_containers(response) == [
        CriContainer(id="c", sandbox_id="s", name="app", attempt=4, state=expected, created=CREATED)
    ]


LAST = datetime.datetime(2262, 4, 11, 23, 47, 16, 854776, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("nanoseconds", "time"), [(NANOSECONDS, CREATED), (0, None), (-1, None), (2**63 - 1, LAST)]
)
def test_container_without_a_usable_time_has_not_started(
    nanoseconds: int, time: datetime.datetime | None
) -> None:
    response = runtime_pb2.ContainerStatusResponse()
    response.status.started_at = nanoseconds
    assert models.decode_started(response) == time


STORED: dict[str, Any] = {
    "Version": "v1",
    "Metadata": {
        "ID": "s",
        "NetNSPath": "/run/netns/cni-1",
        "IP": str(IPV4),
        "AdditionalIPs": [str(IPV6)],
        "Config": {"metadata": {"name": "web", "namespace": "shop", "uid": "u"}},
    },
}


def stored(**changes: Any) -> containerd_pb2.GetContainerResponse:
    content = STORED | {"Metadata": STORED["Metadata"] | changes}
    response = containerd_pb2.GetContainerResponse()
    extension = response.container.extensions["io.cri-containerd.sandbox.metadata"]
    extension.value = json.dumps(content).encode()
    return response


def test_sandbox_that_has_its_network_is_read_before_it_is_listed() -> None:
    expected = Sandbox(
        id="s",
        pod_uid="u",
        pod_name="web",
        pod_namespace="shop",
        attempt=0,
        created=None,
        is_ready=False,
        ips=(IPV4, IPV6),
    )
    assert models.decode_networked(stored()) == NetworkedSandbox(expected, "/run/netns/cni-1")
    alone = msgspec.structs.replace(expected, ips=(IPV4,))
    found = models.decode_networked(stored(AdditionalIPs=None))
    assert found == NetworkedSandbox(alone, "/run/netns/cni-1")


@pytest.mark.parametrize(
    "changes",
    [
        {"IP": "", "AdditionalIPs": None},
        {"NetNSPath": ""},
        {"Config": {"metadata": {"name": "web", "namespace": "shop"}}},
        {"Config": None},
    ],
)
def test_sandbox_without_network_or_pod_is_none_yet(changes: dict[str, Any]) -> None:
    assert models.decode_networked(stored(**changes)) is None
    assert models.decode_networked(containerd_pb2.GetContainerResponse()) is None
