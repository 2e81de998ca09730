"""What the kubelet may not connect to, and what nothing may keep it from."""

import asyncio
import functools
import ipaddress
import pathlib
from collections.abc import Set
from typing import Any, cast

import pytest
import structlog.testing

from agent.admin.report import HostProbeStatus
from agent.kubelet import api_server, host_probes
from agent.kubelet.api_server import KubeletApiServer, KubeletConfigError
from agent.kubelet.host_probes import KubeletHostProbes
from agent.kubelet.identity import KubeletIdentity
from agent.kubelet.search import KubeletCgroup
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.settings import HostProbeMode
from bpf.host_probes import HostProbes, Target
from probes.spec.specs import ProbeHost, parse_pod

METADATA = "169.254.169.254"
_KUBECONFIG = """
apiVersion: v1
kind: Config
clusters:
- {name: one, cluster: {server: "https://198.18.0.1:6443"}}
"""


def _pod(*handlers: dict[str, Any], uid: str = "uid", **more: Any) -> Pod:
    ports = [{"name": "web", "containerPort": 8080}]
    container = {"name": "app", "image": "example", "ports": ports, **_merged(handlers)}
    spec = parse_pod({"spec": {"containers": [container]}})
    return Pod(uid=uid, namespace="shop", name="web", spec=spec, **more)


def _merged(handlers: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return {name: value for handler in handlers for name, value in handler.items()}


def _http(host: str, port: Any = 80, field: str = "readinessProbe") -> dict[str, Any]:
    return {field: {"httpGet": {"host": host, "port": port}}}


def _targets(*pods: Pod) -> set[tuple[str, int]]:
    return {(str(address), port) for address, port in host_probes.named_targets(pods)}


def test_every_probe_and_hook_that_connects_is_found() -> None:
    hook = {"httpGet": {"host": "198.18.0.5"}}
    pod = _pod(
        _http("198.18.0.1", "web"),
        {"livenessProbe": {"tcpSocket": {"host": "198.18.0.2", "port": "22"}}},
        _http("fd00:18::3", 443, "startupProbe"),
        {"lifecycle": {"preStop": hook, "postStart": {"tcpSocket": {"host": "1.1.1.1"}}}},
    )
    assert pod.spec.hosts == (
        ProbeHost("fd00:18::3", 443, "app", "startup"),
        ProbeHost("198.18.0.1", 8080, "app", "readiness"),
        ProbeHost("198.18.0.2", 22, "app", "liveness"),
        # The kubelet runs no tcpSocket hooks, and port 80 is what it takes without one.
        ProbeHost("198.18.0.5", 80, "app", "preStop"),
    )
    assert _targets(pod) == {
        *(("198.18.0.1", 8080), ("198.18.0.2", 22), ("fd00:18::3", 443), ("198.18.0.5", 80))
    }


def test_pods_of_the_host_network_name_addresses_of_their_own_network() -> None:
    """kubeadm's static pods and Cilium's agent probe 127.0.0.1."""
    etcd = _pod(_http("127.0.0.1", 2381, "livenessProbe"), host_network=True)
    assert _targets(etcd) == set()


def test_no_pod_keeps_the_kubelet_from_what_a_pod_of_the_host_network_names() -> None:
    """Otherwise one manifest of any user would restart etcd."""
    etcd = _pod(_http("127.0.0.1", 2381, "livenessProbe"), host_network=True)
    user = _pod(_http("127.0.0.1", 2381), uid="user")
    other = _pod(_http("127.0.0.1", 22), uid="other")
    assert _targets(etcd, user, other) == _targets(other, user, etcd) == {("127.0.0.1", 22)}


def test_pod_s_own_address_is_no_other() -> None:
    own = ipaddress.ip_address("198.18.0.9")
    assert _targets(_pod(_http("198.18.0.9"), reported_addresses=(own,))) == set()


@pytest.mark.parametrize("host", ["metadata.internal", "localhost", "0x7f000001", "127.1", "[::1]"])
def test_names_are_never_denied(host: str) -> None:
    pod = _pod(_http(host))
    assert pod.spec.hosts[0].host == host
    assert _targets(pod) == set()


def test_mapped_address_is_the_one_that_it_maps() -> None:
    assert _targets(_pod(_http(f"::ffff:{METADATA}"))) == {(METADATA, 80)}


@pytest.mark.parametrize("port", [0, 70000, "nothing", True, None, [1], -1, "²"])
def test_port_that_is_none_is_not_denied(port: Any) -> None:
    found = _targets(_pod(_http(METADATA, port)))
    assert found == ({(METADATA, 80)} if port is None else set())


@pytest.mark.parametrize("probe", [None, [], "x", {"httpGet": []}, {"httpGet": {"host": 1}}])
def test_probe_of_any_shape_is_read(probe: Any) -> None:
    assert _pod({"readinessProbe": probe, "lifecycle": probe}).spec.hosts == ()


def test_api_server_of_the_kubelet_is_left_out() -> None:
    address = ipaddress.ip_address("198.18.0.1")
    found: set[Target] = {(address, 6443), (address, 443), (ipaddress.ip_address("::1"), 6443)}
    assert host_probes.without(found, [KubeletApiServer(address, 6443)]) == {
        (address, 443),
        (ipaddress.ip_address("::1"), 6443),
    }
    # Whatever its name resolves to.
    assert host_probes.without(found, [KubeletApiServer(None, 6443)]) == {(address, 443)}


class Proc:
    """/proc with one kubelet."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.root = directory / "42" / "root"
        (self.root / "etc").mkdir(parents=True)

    def write(self, *arguments: str, kubeconfig: str = _KUBECONFIG) -> None:
        text = "\0".join(("/usr/bin/kubelet", *arguments)) + "\0"
        (self.directory / "42" / "cmdline").write_text(text)
        (self.root / "etc" / "kubelet.conf").write_text(kubeconfig)

    def read(self) -> list[KubeletApiServer]:
        return api_server.read(42, procfs=self.directory)


@pytest.fixture
def proc(tmp_path: pathlib.Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kubeconfig=/etc/kubelet.conf",),
        ("--v=2", "--kubeconfig", "/etc/kubelet.conf"),
        ("--kubeconfig", "/etc/kubelet.conf", "--v=2"),
    ],
)
def test_api_server_is_read_from_the_kubelet_s_own_kubeconfig(
    proc: Proc, arguments: tuple[str, ...]
) -> None:
    proc.write(*arguments)
    assert proc.read() == [KubeletApiServer(ipaddress.ip_address("198.18.0.1"), 6443)]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://api.example.com", KubeletApiServer(None, 443)),
        ("https://[fd00:18::1]:6443/", KubeletApiServer(ipaddress.ip_address("fd00:18::1"), 6443)),
        ("http://localhost:8080", KubeletApiServer(None, 8080)),
        ("http://localhost", KubeletApiServer(None, 80)),
        ("198.18.0.1:6443", KubeletApiServer(ipaddress.ip_address("198.18.0.1"), 6443)),
    ],
)
def test_server_is_read_as_the_kubelet_writes_it(
    proc: Proc, url: str, expected: KubeletApiServer
) -> None:
    text = _KUBECONFIG.replace("https://198.18.0.1:6443", url)
    proc.write("--kubeconfig=/etc/kubelet.conf", kubeconfig=text)
    assert proc.read() == [expected]


@pytest.mark.parametrize(
    "kubeconfig",
    [
        *("", "[", "clusters: 1", "clusters: []", "clusters: [{name: a}]", "x: y"),
        "clusters: [{cluster: {server: 'https://:6443'}}]",
    ],
)
def test_kubeconfig_that_cannot_be_read_is_one_sentence(proc: Proc, kubeconfig: str) -> None:
    proc.write("--kubeconfig=/etc/kubelet.conf", kubeconfig=kubeconfig)
    with pytest.raises(KubeletConfigError, match="kubeconfig"):
        proc.read()


@pytest.mark.parametrize("arguments", [(), ("--kubeconfig",), ("--kubeconfig=/missing",)])
def test_kubelet_without_a_kubeconfig_is_one_sentence(
    proc: Proc, arguments: tuple[str, ...]
) -> None:
    proc.write(*arguments)
    with pytest.raises(KubeletConfigError):
        proc.read()


class Map:
    """What is denied."""

    def __init__(self) -> None:
        self.denied: set[Target] = set()
        self.counted: dict[Target, int] = {}
        self.room = 100
        self.written = asyncio.Event()

    def replace(self, targets: Set[Target]) -> int:
        self.denied = set(targets)
        self.written.set()
        return max(len(targets) - self.room, 0)

    def counts(self) -> dict[Target, int]:
        return self.counted


class Kubelet:
    """The kubelet as it was found."""

    current: KubeletCgroup | None = KubeletCgroup("/kubelet", 7, False, 42)


async def _denied(
    monkeypatch: pytest.MonkeyPatch,
    proc: Proc,
    *,
    mode: HostProbeMode = HostProbeMode.DENY,
    kubelet: KubeletCgroup | None = Kubelet.current,
    has_hooks: bool = True,
) -> tuple[set[Target], str]:
    read = functools.partial(api_server.read, procfs=proc.directory)
    monkeypatch.setattr(api_server, "read", read)
    store, found, written = PodStore(Conditions()), Kubelet(), Map()
    found.current = kubelet
    is_attached = [True]
    made = KubeletHostProbes(
        cast(HostProbes, written),
        mode,
        store=store,
        kubelet=cast(KubeletIdentity, found),
        has_connect_hooks=lambda: is_attached[0],
    )
    # Only the agent's start shows which hooks the kernel accepts.
    is_attached[0] = has_hooks
    store.set_pod(_pod(_http(METADATA)))
    store.set_pod(_pod(_http("198.18.0.1", 6443), uid="other"))
    task = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(30):
            await written.written.wait()
        return written.denied, made.problem
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_denied_is_what_pods_name_but_the_api_server(
    monkeypatch: pytest.MonkeyPatch, proc: Proc
) -> None:
    proc.write("--kubeconfig=/etc/kubelet.conf")
    found, problem = await _denied(monkeypatch, proc)
    assert found == {(ipaddress.ip_address(METADATA), 80)}
    assert problem == ""


async def test_nothing_is_denied_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, proc: Proc
) -> None:
    proc.write("--kubeconfig=/etc/kubelet.conf")
    assert await _denied(monkeypatch, proc, mode=HostProbeMode.ALLOW) == (set(), "")


KUBECONFIG = "--kubeconfig=/etc/kubelet.conf"


@pytest.mark.parametrize(
    ("arguments", "kubelet", "has_hooks", "reason"),
    [
        ((), Kubelet.current, True, "the kubelet was started without --kubeconfig"),
        ((KUBECONFIG,), None, True, "the kubelet's process is unknown"),
        (
            (KUBECONFIG,),
            KubeletCgroup("/kubelet", 7, False, None),
            True,
            "the kubelet's process is unknown",
        ),
        (
            (KUBECONFIG,),
            KubeletCgroup("/kubelet", 7, True, 42),
            True,
            "other programs share the kubelet's cgroup",
        ),
        ((KUBECONFIG,), Kubelet.current, False, "the hooks at connect do not work"),
    ],
)
async def test_nothing_is_denied_while_the_api_server_might_be(
    monkeypatch: pytest.MonkeyPatch,
    proc: Proc,
    arguments: tuple[str, ...],
    kubelet: KubeletCgroup | None,
    has_hooks: bool,
    reason: str,
) -> None:
    proc.write(*arguments)
    problem = f"Probes and hooks with host are not denied: {reason}."
    found = await _denied(monkeypatch, proc, kubelet=kubelet, has_hooks=has_hooks)
    assert found == (set(), problem)


async def test_nothing_is_denied_while_the_kubeconfig_cannot_be_read_in_time(
    monkeypatch: pytest.MonkeyPatch, proc: Proc
) -> None:
    def time_out(pid: int, **_: object) -> list[KubeletApiServer]:
        raise TimeoutError

    monkeypatch.setattr(api_server, "read", time_out)
    problem = (
        "Probes and hooks with host are not denied: reading the kubelet's kubeconfig timed out."
    )
    assert await _denied(monkeypatch, proc) == (set(), problem)


@pytest.mark.parametrize(("mode", "rejected"), [(HostProbeMode.DENY, 5), (HostProbeMode.ALLOW, 0)])
def test_report_and_metrics_have_the_rejected_connections(
    mode: HostProbeMode, rejected: int
) -> None:
    written = Map()
    written.counted = {
        (ipaddress.ip_address(METADATA), 80): 2,
        (ipaddress.ip_address("198.18.0.1"), 22): 3,
    }
    made = KubeletHostProbes(
        cast(HostProbes, written),
        mode,
        store=PodStore(Conditions()),
        kubelet=cast(KubeletIdentity, Kubelet()),
        has_connect_hooks=lambda: True,
    )
    assert made.status() == HostProbeStatus(mode=mode.value, problem="", rejected=rejected)
    values = {one.name: sample.value for one in made.collect() for sample in one.samples}
    assert values == {host_probes.DENIED_TARGETS.name: 2, host_probes.DENIED.name: 5}


async def test_what_is_denied_is_logged_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, proc: Proc
) -> None:
    proc.write("--kubeconfig=/etc/kubelet.conf")
    read = functools.partial(api_server.read, procfs=proc.directory)
    monkeypatch.setattr(api_server, "read", read)
    store, written = PodStore(Conditions()), Map()
    made = KubeletHostProbes(
        cast(HostProbes, written),
        HostProbeMode.DENY,
        store=store,
        kubelet=cast(KubeletIdentity, Kubelet()),
        has_connect_hooks=lambda: True,
    )
    task = asyncio.create_task(made.run())

    async def passes() -> None:
        for _ in range(2):
            written.written.clear()
            made.hint()
            async with asyncio.timeout(30):
                await written.written.wait()

    with structlog.testing.capture_logs() as lines:
        await passes()
        assert lines == []
        store.set_pod(_pod(_http(METADATA)))
        await passes()
        written.room = 1
        store.set_pod(_pod(_http(METADATA), _http("198.18.0.5", 81, "livenessProbe")))
        await passes()
        (proc.root / "etc" / "kubelet.conf").unlink()
        await passes()
    fields = ("log_level", "targets", "left_out", "problem")
    assert [tuple(line[name] for name in fields) for line in lines] == [
        ("info", 1, 0, ""),
        ("warning", 1, 1, ""),
        ("warning", 0, 0, made.problem),
    ]
    assert "kubelet.conf" in made.problem
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_denied_follows_pods_and_the_kubelet(
    monkeypatch: pytest.MonkeyPatch, proc: Proc
) -> None:
    proc.write(KUBECONFIG)
    monkeypatch.setattr(
        api_server, "read", functools.partial(api_server.read, procfs=proc.directory)
    )
    store, found, written = PodStore(Conditions()), Kubelet(), Map()
    found.current = None
    made = KubeletHostProbes(
        cast(HostProbes, written),
        HostProbeMode.DENY,
        store=store,
        kubelet=cast(KubeletIdentity, found),
        has_connect_hooks=lambda: True,
    )
    task = asyncio.create_task(made.run())

    async def denied() -> set[Target]:
        async with asyncio.timeout(30):
            await written.written.wait()
        written.written.clear()
        return written.denied

    assert await denied() == set()
    store.set_pod(_pod(_http(METADATA)))
    assert await denied() == set()
    found.current = Kubelet.current
    made.hint()
    assert await denied() == {(ipaddress.ip_address(METADATA), 80)}
    assert made.problem == ""
    store.remove_pod("uid")
    assert await denied() == set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
