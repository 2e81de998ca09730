"""The relay recognises the probes of a real kubelet, which accepts its answers.

tests/agent/relay/recorded has those of Kubernetes 1.36.2; this shows the same of any other.
"""

import re

import pytest

from agent.lab.lab import NODE_IPV4
from agent.relay.probe_requests import RequestReader, grpc_request
from probes.protocols.http1_requests import request_bytes, request_headers
from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.recording import recorder
from tests.cluster.workloads import Workloads
from tests.runtime import images

pytestmark = pytest.mark.kernel

_HEADERS = (
    *(("x-b", "2"), ("X-a", " 1 "), ("X-B", "3")),
    # More than the 4 KiB that Go's client writes at once.
    *(("Authorization", "Bearer x"), ("X-Long", "v" * 5000)),
)


# A busy machine must not add failures of its own, nor restart a container.
_PACE: Json = {"periodSeconds": 1, "timeoutSeconds": 60, "failureThreshold": 1000}


def _container(name: str, liveness: Json, readiness: Json) -> Json:
    return {
        "name": name,
        "image": images.POD,
        "command": ["/bin/sleep", "1000000"],
        "livenessProbe": {**liveness, **_PACE},
        "readinessProbe": {**readiness, **_PACE, "failureThreshold": 1},
    }


_UNHEALTHY = {
    'web: Liveness probe failed: service unhealthy (responded with "NOT_SERVING")',
    "web: Readiness probe failed: HTTP probe failed with statuscode: 503",
}


def test_kubelet_sends_what_the_relay_recognises_and_accepts_its_answers(
    namespaces: Namespaces,
) -> None:
    """The pod is on the host's network, where the test itself is the server."""
    users = namespaces()
    with recorder(str(NODE_IPV4), healthy="", sick="db") as (recorded, port):
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
        polling.wait_until(
            "each failure is reported", lambda: _UNHEALTHY.issubset(users.unhealthy())
        )
        polling.wait_until("one is ready", lambda: _ready(users) == {"plain"})
        # Each answer was understood.
        assert set(users.unhealthy()) == _UNHEALTHY
    (version,) = {re.findall(rb"kube-probe/[0-9.]+", sent)[0].decode() for sent in recorded.http}
    host = f"{NODE_IPV4}:{port}"
    assert set(recorded.http) == {
        request_bytes("/a?b=c%20d", host, request_headers((), version)),
        request_bytes("/x", host, request_headers(_HEADERS, version)),
    }
    assert _services(recorded.grpc) == {"db", ""}


def _ready(users: Workloads) -> set[str]:
    """Names of ready containers."""
    statuses = [one for pod in users.pods() for one in pod["status"].get("containerStatuses", [])]
    return {one["name"] for one in statuses if one["ready"]}


def _services(conversations: list[list[bytes]]) -> set[str | None]:
    """Those that the relay finds in these conversations, None for what is no probe."""
    found: set[str | None] = set()
    for pieces in conversations:
        reader = RequestReader({}, {grpc_request(name): name for name in ("db", "")})
        found.add([reader.feed(piece) for piece in pieces][-1])
    return found
