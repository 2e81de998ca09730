"""Every kind of probe and hook of a real kubelet, in pods closed to all other host processes."""

import inspect

import pytest

from tests import polling
from tests.cluster import app
from tests.cluster.api import ApiError, Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.firewall import firewall
from tests.cluster.one_node import IMAGE, OneNode
from tests.cluster.workloads import (
    ISOLATION_READY,
    PROBES_PASSING,
    WEB,
    Workloads,
    is_reachable,
)
from tests.runtime import images

pytestmark = pytest.mark.kernel
_MODES = {"enforce": "Enforced", "strict": "Strict"}
_HANDLERS: dict[str, Json] = {
    "http": {"httpGet": {"port": app.HTTP, "path": "/"}},
    "https": {"httpGet": {"port": app.HTTPS, "path": "/", "scheme": "HTTPS"}},
    "redirect": {"httpGet": {"port": app.HTTP, "path": "/redirect"}},
    "grpc": {"grpc": {"port": app.GRPC}},
    "tcp": {"tcpSocket": {"port": app.TCP}},
    "exec": {"exec": {"command": ["/bin/cat", "/www/healthz"]}},
}
_HTTP_HOOK: Json = {"httpGet": {"port": app.HTTP, "path": "/stopping"}}
_HTTPS_HOOK: Json = {"httpGet": {"port": app.HTTPS, "path": "/stopping", "scheme": "HTTPS"}}
_KINDS = ("http", "https", "redirected", "grpc", "tcp")
_PORTS = (app.HTTP, app.HTTPS, app.GRPC, app.TCP, app.REDIRECTED)


@pytest.fixture
def server(node: OneNode) -> Json:
    """The data of a ConfigMap: the server and its certificate."""
    pki = node.control_plane.pki
    pki.sign("app", user="app", hosts="DNS:app")
    return {
        "app.py": inspect.getsource(app),
        "tls.crt": pki.certificate("app").read_text(),
        "tls.key": pki.key("app").read_text(),
    }


def _run(users: Workloads, data: Json, pre_stop: Json = _HTTP_HOOK) -> Json:
    """A pod with one container that serves, and one for each handler, which has all its probes."""
    path = f"/api/v1/namespaces/{users.namespace}/configmaps"
    users.api.create(path, {"metadata": {"name": "app"}, "data": data})
    hooks = {
        "postStart": {"httpGet": {"port": app.HTTP, "path": "/started"}},
        "preStop": pre_stop,
    }
    https = {"httpGet": {"port": app.HTTPS, "path": "/started", "scheme": "HTTPS"}}
    lifecycles = {"http": hooks, "https": {"postStart": https}}
    serving = {
        "name": "app",
        "image": IMAGE,
        "command": ["/usr/bin/python3", "/app/app.py", "/app"],
        "volumeMounts": [{"name": "app", "mountPath": "/app"}],
        "startupProbe": {
            **_HANDLERS["http"],
            "periodSeconds": 1,
            "failureThreshold": 60,
        },
    }
    probing = [
        {
            "name": name,
            "image": images.POD,
            "command": ["/bin/sleep", "1000000"],
            **({"lifecycle": lifecycles[name]} if name in lifecycles else {}),
            **{
                # The first ones fail while the server starts, without an Event of a failed probe.
                kind: {**handler, "periodSeconds": 1, "initialDelaySeconds": 8}
                for kind in ("readinessProbe", "livenessProbe")
            },
        }
        for name, handler in _HANDLERS.items()
    ]
    # An init container that keeps serving is ready before the hooks of the others run.
    sidecar = {**serving, "restartPolicy": "Always"}
    return users.run(
        "web",
        *probing,
        gates=(ISOLATION_READY, PROBES_PASSING),
        initContainers=[sidecar],
        volumes=[{"name": "app", "configMap": {"name": "app"}}],
        terminationGracePeriodSeconds=10,
    )


def _requests(users: Workloads) -> set[tuple[str, ...]]:
    log = users.api.text(f"{users.pods_path}/web/log?container=app")
    # The last line may be incomplete, gRPC has no address of a client that is gone, and the server
    # reports errors of such clients.
    lines = map(str.split, log.rpartition("\n")[0].splitlines())
    return {tuple(words) for words in lines if len(words) > 1 and words[0] in _KINDS}


def _failed(users: Workloads) -> list[str]:
    """Probes that failed, except of a server that does not listen yet."""
    return [message for message in users.unhealthy() if "Startup probe failed" not in message]


@pytest.mark.parametrize("mode", _MODES)
def test_every_handler_passes_and_nothing_else_of_the_host_does(
    podgate: Deployment, namespaces: Namespaces, server: Json, mode: str
) -> None:
    users = namespaces(mode)
    _run(users, server)
    users.until("web", ISOLATION_READY, "True", _MODES[mode])
    (pod,) = users.until_ready("web")
    assert not any(is_reachable(pod, port) for port in _PORTS)
    requests = _requests(users)
    address = pod["status"]["podIP"]
    # podgate's own probes begin in the pod, and in strict the relay's connections for the kubelet.
    hosts = {client for _, client, *_ in requests} - {address}
    assert len(hosts) == (0 if mode == "strict" else 1), hosts
    kubelet = next(iter(hosts), address)
    expected = {
        ("http", kubelet, "/"),
        ("http", kubelet, "/started"),
        ("http", kubelet, "/redirect"),
        ("redirected", kubelet, "/target"),
        ("https", kubelet, "/"),
        ("https", kubelet, "/started"),
        ("grpc", kubelet),
        ("tcp", kubelet),
    }
    assert expected <= requests, expected - requests
    assert users.restarts() == {}
    assert _failed(users) == []


@pytest.mark.parametrize(
    ("mode", "hook"), [("enforce", _HTTP_HOOK), ("strict", _HTTP_HOOK), ("strict", _HTTPS_HOOK)]
)
def test_pre_stop_hook_reaches_the_pod_after_its_deletion(
    namespaces: Namespaces, server: Json, mode: str, hook: Json
) -> None:
    users = namespaces(mode)
    _run(users, server, pre_stop=hook)
    users.until_ready("web")
    path = f"{users.pods_path}/web"
    users.api.delete(path)
    polling.wait_until(
        "the hook ran",
        lambda: any("/stopping" in request for request in _requests(users)),
    )
    users.until_gone("web")
    assert users.events("FailedPreStopHook") == []


def test_probes_and_hooks_reach_pods_in_enforce_where_the_node_is_blocked(
    podgate: Deployment, namespaces: Namespaces, server: Json
) -> None:
    """The https hook, too: from inside the pod, by the relay."""
    users = namespaces("enforce")
    with firewall():
        _run(users, server, pre_stop=_HTTPS_HOOK)
        (pod,) = users.until_ready("web")
        users.until("web", ISOLATION_READY, "True", "Enforced")
        assert not any(is_reachable(pod, port) for port in _PORTS)
        address = pod["status"]["podIP"]
        expected = {("http", address, "/started"), ("redirected", address, "/target")}
        polling.wait_until("probes and hooks", lambda: expected <= _requests(users))
        assert users.restarts() == {}
        assert _failed(users) == []
        users.api.delete(f"{users.pods_path}/web")
        stopping = ("https", address, "/stopping")
        polling.wait_until("the https hook", lambda: stopping in _requests(users))
        users.until_gone("web")
    assert users.events("FailedPreStopHook") == []
    assert users.events("FailedPostStartHook") == []


def test_api_server_accepts_no_https_hook_without_a_port(namespaces: Namespaces) -> None:
    """So the default port of KEP-2771 is for manifests and `podgate probe` alone."""
    users = namespaces("")
    hook = {"preStop": {"httpGet": {"path": "/", "scheme": "HTTPS"}}}
    with pytest.raises(ApiError) as raised:
        users.run("web", {**WEB, "lifecycle": hook})
    assert raised.value.code == 422
    assert "lifecycle.preStop.httpGet.port" in str(raised.value)
