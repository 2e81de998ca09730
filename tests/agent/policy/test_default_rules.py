"""Rules of podgate's own: what the API server calls, DNS of the node, and known agents."""

import asyncio
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agent.kube.client import ApiClient
from agent.linux.cgroups import CgroupId
from agent.linux.procfs import Procfs
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.policy import api_server, api_types, host_agents
from agent.policy.api_callees import ApiCallees, CalleeSnapshot
from agent.policy.api_server import ApiServerProcess
from agent.policy.api_types import Policy
from agent.policy.default_rules import DefaultRules
from agent.policy.effective import PolicyBatch, join
from agent.policy.kinds import PolicyError
from agent.policy.matching import RuleSet
from agent.settings import DEFAULT_RULE_GROUPS
from probes.spec.specs import parse_pod
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, server
from tests.agent.policy.test_files import policy
from tests.blocking import may_block

__all__ = ["api", "kubeconfig", "listening", "server"]

pytestmark = pytest.mark.looptime

IN_A_THREAD = "the agent calls it in a thread, for which fake time would not wait"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
VALIDATING = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
MUTATING = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
SERVICES = "/api/v1/services"

STATIC_POD = Pod(
    uid="0123456789abcdef0123456789abcdef",
    namespace="kube-system",
    name="kube-apiserver-node1",
    host_network=True,
    labels={"component": "kube-apiserver", "tier": "control-plane"},
)


class Rules:
    """The default rules of a node, with its pods."""

    @may_block(IN_A_THREAD)
    def __init__(
        self,
        api: ApiClient,
        state: pathlib.Path,
        *pods: Pod,
        disabled: Collection[str] = (),
        procfs: Procfs | None = None,
    ) -> None:
        self.store = PodStore(Conditions())
        for one in pods:
            self.store.set_pod(one)
        self.procfs = procfs
        self.callees = ApiCallees(api, state=state, jitter=lambda: 0.5)
        self.rules = DefaultRules(self.callees, store=self.store, disabled=disabled, procfs=procfs)
        self.rules.restore()

    @property
    def policies(self) -> dict[str, Policy]:
        self.refresh()
        return {one.name.removeprefix("podgate:"): one for one in self.rules.batch.policies}

    @property
    def calls(self) -> list[str]:
        return [name for name in self.policies if name.startswith("api-server/")]

    @may_block(IN_A_THREAD)
    def refresh(self) -> bool:
        return self.rules.refresh()

    @may_block(IN_A_THREAD)
    def search(self) -> None:
        """Search for an API server; the interval is of real seconds."""
        self.rules = DefaultRules(self.callees, store=self.store, disabled=(), procfs=self.procfs)
        self.rules.refresh()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Rules"]:
        self.refresh()
        task = asyncio.create_task(self.callees.run())
        try:
            await asyncio.sleep(5)
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def put(server: ApiServer, path: str, name: str, namespace: str = "", **fields: Any) -> None:
    metadata = {"name": name, "uid": f"uid-{path}-{namespace}-{name}"}
    if namespace:
        metadata["namespace"] = namespace
    server.put({"metadata": metadata, **fields}, path=path)


def service(server: ApiServer, name: str, *ports: dict[str, Any], **spec: Any) -> None:
    given = {"selector": {"app": name}, "ports": list(ports), **spec}
    put(server, SERVICES, name, "shop", spec=given)


def client_config(name: str, **more: Any) -> dict[str, Any]:
    return {"clientConfig": {"service": {"namespace": "shop", "name": name, **more}}}


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "callees.json"


@pytest.fixture
def callees(server: ApiServer) -> None:
    """One of each kind."""
    for name in ("admission", "mutation", "conversion", "metrics"):
        service(server, name, {"port": 443, "targetPort": 8443}, {"port": 80, "targetPort": 8080})
    url = {"clientConfig": {"url": "https://elsewhere.example/"}}
    put(server, VALIDATING, "a", webhooks=[client_config("admission"), url])
    put(server, MUTATING, "b", webhooks=[client_config("mutation", port=80)])
    conversion = {"strategy": "Webhook", "webhook": client_config("conversion")}
    put(server, DEFINITIONS, "c.example", spec={"conversion": conversion})
    put(server, DEFINITIONS, "d.example", spec={"conversion": {"strategy": "None"}})
    metrics = {"namespace": "shop", "name": "metrics", "port": 443}
    put(server, API_SERVICES, "v1.metrics.example", spec={"service": metrics})
    put(server, API_SERVICES, "v1.apps", spec={"service": None})


@pytest.mark.usefixtures("callees")
async def test_api_server_may_call_what_the_cluster_registered_and_nothing_else(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with Rules(api, state, STATIC_POD).running() as node:
        assert node.calls == [
            "api-server/shop/admission:8443",
            "api-server/shop/conversion:8443",
            "api-server/shop/metrics:8443",
            "api-server/shop/mutation:8080",
        ]
        rules = RuleSet.of(node.policies.values())
        (static,) = [
            name for name, one in rules.host_pods().items() if one == api_server.STATIC_PODS
        ]
        rules = rules.with_cgroups({static: (CgroupId(7, 3),)})
        admission = Pod(uid="1", namespace="shop", name="a", labels={"app": "admission"})
        (rule,) = rules.admit(admission, ()).rules
        assert (rule.cgroup, rule.protocol, rule.first_port, rule.last_port) == (7, 6, 8443, 8443)
        other = Pod(uid="2", namespace="shop", name="b", labels={"app": "other"})
        assert rules.admit(other, ()).rules == ()
        server.delete("a", namespace="", path=VALIDATING)
        await asyncio.sleep(1)
        assert "api-server/shop/admission:8443" not in node.calls


async def test_callee_is_the_tcp_port_of_the_service_that_is_named(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    service(server, "same", {"port": 443})
    service(server, "udp", {"port": 443, "targetPort": 1, "protocol": "UDP"}, {"port": 442})
    service(server, "more", {"port": 9443, "targetPort": "web"}, {"port": 443, "targetPort": 2})
    service(server, "bare", selector=None)
    named = ("missing", "bare", "udp", "same", "more")
    put(server, VALIDATING, "a", webhooks=[*map(client_config, named)])
    put(server, VALIDATING, "b", webhooks=[client_config("more", port=9443), {}])
    put(server, VALIDATING, "c")
    put(server, DEFINITIONS, "d.example", spec={"conversion": {"webhook": None}})
    put(server, DEFINITIONS, "e.example", spec={})
    async with Rules(api, state, STATIC_POD).running() as node:
        assert node.calls == [
            "api-server/shop/more:web",
            "api-server/shop/more:2",
            "api-server/shop/same:443",
        ]
        assert node.callees.snapshot.without_selector == ("shop/bare",)


async def test_endpoints_are_all_addresses_with_their_ports(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    addresses = [{"addresses": ["198.18.0.2", "198.18.0.1"]}, {"addresses": ["198.18.0.3"]}]
    ports = [{"name": "https", "port": 6443}, {"name": "any"}]
    put(server, SLICES, "kubernetes", "default", endpoints=addresses, ports=ports)
    async with Rules(api, state).running() as node:
        assert node.callees.snapshot.endpoints == tuple(
            (f"198.18.0.{number}", 6443) for number in (1, 2, 3)
        )
        put(server, SLICES, "kubernetes", "default", endpoints=None, ports=None)
        await asyncio.sleep(1)
        assert node.callees.snapshot.endpoints == ()


async def test_change_of_a_callee_is_yielded_at_once_and_else_after_the_time(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with Rules(api, state, STATIC_POD).running() as node:
        now = asyncio.get_running_loop().time
        changes = node.rules.changes(at_least_every_seconds=100)
        await anext(changes)
        put(server, VALIDATING, "a", webhooks=[client_config("admission")])
        before = now()
        asyncio.get_running_loop().call_later(7, service, server, "admission", {"port": 443})
        await anext(changes)
        assert now() - before < 8
        assert node.calls == ["api-server/shop/admission:443"]
        await anext(changes)
        assert now() - before >= 100


@pytest.mark.usefixtures("callees")
async def test_rules_are_listed_once_what_an_api_server_calls_is(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async def slow(request: web.Request) -> None:
        if request.path == SERVICES:
            await asyncio.sleep(10)

    server.faults.append(slow)
    node = Rules(api, state, STATIC_POD)
    is_listed = [node.rules.is_listed]
    async with node.running():
        is_listed.append(node.rules.is_listed)
        await asyncio.sleep(10)
        is_listed.append(node.rules.is_listed)
        assert is_listed == [False, False, True]
        assert [one.query.name for one in node.callees.watchers] == [
            "endpoints of API servers",
            "validatingwebhookconfigurations",
            "mutatingwebhookconfigurations",
            "customresourcedefinitions",
            "apiservices",
            "services",
        ]
    assert Rules(api, state, STATIC_POD, disabled=["api-server"]).rules.is_listed


@pytest.mark.parametrize(
    ("path", "code", "is_known"),
    [(API_SERVICES, 404, True), (API_SERVICES, 403, False), (VALIDATING, 404, False)],
)
@pytest.mark.usefixtures("callees")
async def test_cluster_without_aggregated_apis_has_the_other_callees(
    server: ApiServer, api: ApiClient, state: pathlib.Path, path: str, code: int, *, is_known: bool
) -> None:
    async def fail(request: web.Request) -> web.StreamResponse | None:
        return web.Response(status=code) if request.path == path else None

    server.faults.append(fail)
    async with Rules(api, state, STATIC_POD).running() as node:
        names = ("conversion:8443", "admission:8443", "mutation:8080")
        assert set(node.calls) == (
            {f"api-server/shop/{one}" for one in names} if is_known else set()
        )


async def test_callees_are_saved_for_an_api_server_s_rules_alone(
    api: ApiClient, state: pathlib.Path
) -> None:
    Rules(api, state, disabled=["api-server"]).refresh()
    assert not await asyncio.to_thread(state.exists)
    Rules(api, state).refresh()
    assert await asyncio.to_thread(state.exists)


async def test_callees_that_have_not_changed_are_not_written_again(
    api: ApiClient, state: pathlib.Path
) -> None:
    rules = Rules(api, state, STATIC_POD)
    assert rules.refresh()
    before = await asyncio.to_thread(state.stat)
    rules.store.remove_pod(STATIC_POD.uid)
    assert rules.refresh(), "no API server is here any more"
    after = await asyncio.to_thread(state.stat)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


NO_API_SERVERS = [
    [],
    [msgspec.structs.replace(STATIC_POD, host_network=False)],
    [msgspec.structs.replace(STATIC_POD, labels={"component": "etcd"})],
    [msgspec.structs.replace(STATIC_POD, namespace="default")],
]


@pytest.mark.parametrize("pods", NO_API_SERVERS)
@pytest.mark.usefixtures("callees")
async def test_other_nodes_watch_only_where_api_servers_are(
    server: ApiServer, api: ApiClient, state: pathlib.Path, pods: list[Pod]
) -> None:
    async with Rules(api, state, *pods).running() as node:
        assert node.calls == []
        assert node.rules.is_listed
    assert {one.path for one in server.received} == {SLICES}
    assert {one.query["fieldSelector"] for one in server.received} == {"metadata.name=kubernetes"}


@pytest.mark.usefixtures("callees")
async def test_callees_outlive_the_agent_while_the_api_server_is_down(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with Rules(api, state, STATIC_POD).running() as node:
        before = node.calls
    assert len(before) == 4
    assert Rules(api, state, STATIC_POD).calls == before

    async def slow(request: web.Request) -> None:
        if request.path == SERVICES:
            await asyncio.sleep(100)

    server.faults.append(slow)
    async with Rules(api, state, STATIC_POD).running() as node:
        assert node.calls == before, "not all is listed"


@pytest.mark.usefixtures("callees")
async def test_port_by_name_and_service_without_selector(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    service(server, "admission", {"port": 443, "targetPort": "webhook"})
    service(server, "mutation", {"port": 80}, selector=None)
    async with Rules(api, state, STATIC_POD).running() as node:
        assert "api-server/shop/admission:webhook" in node.calls
        spec = parse_pod(
            {
                "spec": {
                    "containers": [
                        {"name": "a", "ports": [{"name": "webhook", "containerPort": 9443}]}
                    ]
                }
            }
        )
        labels = {"app": "admission"}
        admission = Pod(uid="1", namespace="shop", name="a", labels=labels, spec=spec)
        rules = RuleSet.of(node.policies.values())
        (static,) = [
            name for name, one in rules.host_pods().items() if one == api_server.STATIC_PODS
        ]
        admitted = rules.with_cgroups({static: (CgroupId(7, 3),)}).admit(admission, ()).rules
        assert [rule.first_port for rule in admitted] == [9443]
        assert not any("mutation" in name for name in node.calls)
        assert node.rules.batch.problems == (
            "Service shop/mutation of a webhook or APIService has no selector; write a "
            "HostAccessPolicy for its pods.",
        )


@pytest.mark.usefixtures("callees")
async def test_callee_whose_port_has_no_valid_name_is_a_problem_and_affects_no_other(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    service(server, "admission", {"port": 443, "targetPort": "Web"})
    async with Rules(api, state, STATIC_POD).running() as node:
        assert len(node.calls) == 3
        assert node.rules.batch.problems == (
            "podgate's default rules, api-server/shop/admission:Web: spec.ports[0].port: 'Web' is "
            "neither a port nor its name.",
        )


@pytest.mark.parametrize("group", DEFAULT_RULE_GROUPS)
@pytest.mark.usefixtures("callees")
async def test_each_group_can_be_switched_off(
    server: ApiServer, api: ApiClient, state: pathlib.Path, group: str
) -> None:
    async with Rules(api, state, STATIC_POD).running() as node:
        groups = {name.partition("/")[0] for name in node.policies}
        assert groups == set(DEFAULT_RULE_GROUPS)
        assert {one.source for one in node.policies.values() if one.name.startswith(group)} <= {
            f"default rules, group {group}"
        }
    off = Rules(api, state, STATIC_POD, disabled=[group])
    assert {name.partition("/")[0] for name in off.policies} == groups - {group}


async def test_users_policies_come_first_and_cannot_have_the_names(
    api: ApiClient, state: pathlib.Path
) -> None:
    node = Rules(api, state)
    names = list(node.policies.values())
    with pytest.raises(PolicyError, match="not a valid name"):
        api_types.read(policy(names[0].name), source="a.yaml")
    joined = join([PolicyBatch("user", ()), node.rules.batch], name="both")
    assert joined.policies == tuple(names)


async def test_agent_of_the_table_reaches_pods_only_from_its_namespace_on_the_host_network(
    api: ApiClient, state: pathlib.Path
) -> None:
    rules = RuleSet.of(Rules(api, state).policies.values())
    labels = {
        "app.kubernetes.io/name": "ingress-nginx",
        "app.kubernetes.io/component": "controller",
    }
    selectors = rules.host_pods().values()
    assert any(one.matches("ingress-nginx", labels, {}) for one in selectors)
    assert not any(one.matches("default", labels, {}) for one in selectors)
    # Without one of its pods on the node, nothing is admitted.
    other = Pod(uid="1", namespace="shop", name="web")
    assert rules.admit(other, ()).rules == ()


async def test_node_may_resolve_names(api: ApiClient, state: pathlib.Path) -> None:
    ports = [
        {"name": "dns", "containerPort": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "containerPort": 53},
        {"name": "metrics", "containerPort": 9153},
    ]
    spec = parse_pod({"spec": {"containers": [{"name": "coredns", "ports": ports}]}})
    labels = {"k8s-app": "kube-dns"}
    dns = Pod(uid="1", namespace="kube-system", name="dns", labels=labels, spec=spec)
    rules = RuleSet.of(Rules(api, state).policies.values()).admit(dns, ()).rules
    assert sorted((rule.protocol, rule.first_port) for rule in rules) == [(6, 53), (17, 53)]


def test_table_names_its_manifests_and_is_bound_to_namespaces() -> None:
    names = [(one.group, one.name) for one in host_agents.TABLE]
    assert len(set(names)) == len(names)
    for agent in host_agents.TABLE:
        assert agent.manifest
        for source in agent.spec.from_:
            if source.host_network_pods:
                assert source.host_network_pods.namespaces


LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[tuple[int, int]]:
    """A process that listens on a port: its pid and the port."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


class OneProcess(Procfs):
    """The real /proc, in which one process is in a cgroup of its own."""

    def __init__(self, pid: int, cgroup: str, *, is_privileged: bool = True) -> None:
        super().__init__()
        self.searches = 0
        self._pid = pid
        self._cgroup = cgroup
        self._is_privileged = is_privileged

    def pids(self) -> Iterator[int]:
        self.searches += 1
        return iter((os.getpid(), self._pid))

    def cgroups(self, pid: int | str) -> dict[str, str]:
        return {"0": self._cgroup if pid == self._pid else "/user.slice"}

    def has_capability(self, pid: int, capability: int) -> bool:
        return self._is_privileged


def test_host_process_is_the_api_server_by_address_port_and_capability(
    listener: tuple[int, int],
) -> None:
    pid, port = listener
    unit = "/system.slice/kube-apiserver.service"
    endpoints = [("127.0.0.1", port)]

    def found(endpoints: list[tuple[str, int]], procfs: Procfs) -> str | None:
        return ApiServerProcess(procfs).find_cgroup(endpoints)

    assert found(endpoints, OneProcess(pid, unit)) == unit
    assert found(endpoints, OneProcess(pid, unit, is_privileged=False)) is None
    assert found(endpoints, OneProcess(pid, "/kubepods/pod0/" + "a" * 64)) is None
    assert found(endpoints, OneProcess(pid, "/")) is None
    # Another node's.
    assert found([("198.18.255.254", port)], OneProcess(pid, unit)) is None
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert found([other.getsockname()], OneProcess(pid, unit)) == "/user.slice"


def test_api_server_that_was_found_costs_no_search_of_all_processes(
    listener: tuple[int, int],
) -> None:
    pid, port = listener
    procfs = OneProcess(pid, "/system.slice/kube-apiserver.service")
    process = ApiServerProcess(procfs)
    first = process.find_cgroup([("127.0.0.1", port)])
    searches = procfs.searches
    assert process.find_cgroup([("127.0.0.1", port)]) == first == procfs.cgroups(pid)["0"]
    assert procfs.searches == searches == 1
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert process.find_cgroup([other.getsockname()]) == "/user.slice"


async def test_processes_are_searched_at_most_once_in_some_seconds(
    api: ApiClient, state: pathlib.Path, listener: tuple[int, int]
) -> None:
    pid, port = listener
    procfs = OneProcess(pid, "/system.slice/other.service", is_privileged=False)
    node = Rules(api, state, procfs=procfs)
    node.callees.snapshot = CalleeSnapshot((("127.0.0.1", port),))
    for _ in range(3):
        node.refresh()
    assert procfs.searches == 1


@pytest.mark.usefixtures("callees")
async def test_api_server_as_a_host_process_is_found_by_its_endpoint(
    server: ApiServer, api: ApiClient, state: pathlib.Path, listener: tuple[int, int]
) -> None:
    pid, port = listener
    put(
        *(server, SLICES, "kubernetes", "default"),
        endpoints=[{"addresses": ["127.0.0.1"]}],
        ports=[{"name": "https", "port": port, "protocol": "TCP"}],
    )
    procfs = OneProcess(pid, "/system.slice/kube-apiserver.service")
    async with Rules(api, state, procfs=procfs).running() as node:
        node.search()
        await asyncio.sleep(5)
        (rule,) = node.policies["api-server/shop/admission:8443"].rules
        assert (rule.source.kind, rule.source.name) == (
            "exact",
            "/system.slice/kube-apiserver.service",
        )


async def test_rules_are_read_again_only_after_a_change(
    api: ApiClient, state: pathlib.Path
) -> None:
    rules = Rules(api, state)
    assert [rules.refresh() for _ in range(3)] == [True, False, False]
