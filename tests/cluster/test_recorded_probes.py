"""A real kubelet's probes have the bytes by which the relay recognises them.

tests/agent/relay/recorded has those of Kubernetes 1.36.2; this shows the same of any other.
"""

import re

import pytest

from agent.lab.lab import NODE_IPV4
from agent.relay.probe_requests import RequestReader, grpc_request
from probes.protocols import http1
from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.recording import recorder
from tests.runtime import images

pytestmark = pytest.mark.kernel

_HEADERS = (
    *(("x-b", "2"), ("X-a", " 1 "), ("X-B", "3")),
    # More than the 4 KiB that Go's client writes at once.
    *(("Authorization", "Bearer x"), ("X-Long", "v" * 5000)),
)


def _container(name: str, liveness: Json, readiness: Json) -> Json:
    return {
        "name": name,
        "image": images.POD,
        "command": ["/bin/sleep", "1000000"],
        "livenessProbe": {**liveness, "periodSeconds": 1, "failureThreshold": 1000},
        "readinessProbe": {**readiness, "periodSeconds": 1},
    }


def test_kubelet_sends_the_probes_that_the_relay_recognises(namespaces: Namespaces) -> None:
    """The pods are on the host's network, where the test itself is the server."""
    users = namespaces()
    with recorder(str(NODE_IPV4)) as (recorded, port):
        headers = [{"name": name, "value": value} for name, value in _HEADERS]
        users.run(
            "web",
            _container(
                "plain",
                {"grpc": {"port": port, "service": "db"}},
                {"httpGet": {"port": port, "path": "/a?b=c%20d"}},
            ),
            _container(
                "headers",
                {"grpc": {"port": port}},
                {"httpGet": {"port": port, "path": "/x", "httpHeaders": headers}},
            ),
            hostNetwork=True,
        )
        polling.wait_until(
            "each probe is recorded",
            lambda: len(set(recorded.http)) > 1 and len(_services(recorded.grpc)) > 1,
        )
    (version,) = {re.findall(rb"kube-probe/[0-9.]+", sent)[0].decode() for sent in recorded.http}
    host = f"{NODE_IPV4}:{port}"
    assert set(recorded.http) == {
        http1.request_bytes("/a?b=c%20d", host, http1.request_headers((), version)),
        http1.request_bytes("/x", host, http1.request_headers(_HEADERS, version)),
    }
    assert _services(recorded.grpc) == {"db", ""}


def _services(conversations: list[list[bytes]]) -> set[str | None]:
    """Those that the relay finds in these conversations; None for what is no probe."""
    found = set()
    for pieces in conversations:
        reader = RequestReader({}, {grpc_request(name): name for name in ("db", "")})
        found.add([reader.feed(piece) for piece in pieces][-1])
    return found
