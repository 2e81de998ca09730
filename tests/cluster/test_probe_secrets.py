"""Client certificates of probes in Secrets, on a real API server with the chart's rights: which the
agents' account reads, and what a probe shows as a Secret comes, changes and goes."""

import asyncio
import base64
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin import findings
from agent.admin.report import PodProblem
from agent.kube.client import ApiClient
from agent.probing import certificates
from agent.probing.certificates import ProbeCertificates
from probes.engine import prober
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import CertificateName, HttpGet, Probe, TlsPolicy
from tests import polling
from tests.agent.operate.page.reports import pod, report
from tests.agent.probing.test_certificates import running
from tests.chart import rendering
from tests.cluster import api_only, conftest, deployment
from tests.cluster.api import Json
from tests.cluster.api_only import ApiOnly
from tests.probes.authorities import Authority, serving
from tests.probes.conftest import Sandbox, sandbox_netns
from tests.probes.single_probe import OK

pytestmark = pytest.mark.kernel
_SHOP, _BANK = "shop", "bank"
_NAMED, _OTHER = "queue-client", "database"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_OF_CLUSTER = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
_NAME = CertificateName(secret=_NAMED)
_HANDLER = functools.partial(HttpGet, scheme="HTTPS", tls=TlsPolicy(certificate=_NAME))


def _secrets(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/secrets"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    """With all rights of the agents, and the Role of the chart for one Secret."""
    directory = tmp_path_factory.mktemp("secrets")
    with api_only.running(conftest.binaries(), directory) as made:
        for name in (deployment.NAMESPACE, _SHOP, _BANK):
            made.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        values = {"probeCertificates": {"secrets": {_SHOP: [_NAMED]}}}
        for thing in rendering.objects(values, service="kubectl"):
            kind, metadata = thing["kind"], thing["metadata"]
            if kind in _OF_CLUSTER:
                made.api.create(deployment.PATHS[kind], thing)
            elif metadata.get("namespace") == _SHOP:
                plural = {"Role": "roles", "RoleBinding": "rolebindings"}[kind]
                made.api.create(f"{_RBAC}/namespaces/{_SHOP}/{plural}", thing)
        for namespace in (deployment.NAMESPACE, _SHOP, _BANK):
            for name in (_NAMED, _OTHER):
                body = {"metadata": {"name": name}, "stringData": {"password": "x"}}
                made.api.create(_secrets(namespace), body)
        named = f"{_secrets(_SHOP)}/{_NAMED}"
        polling.wait_until("the role is in force", lambda: _code(made, "GET", named) == 200)
        yield made


def _code(server: ApiOnly, method: str, path: str) -> int:
    """Of a request by the agents' account."""
    token = server.token("podgate")
    if method != "PATCH":
        return server.send(method, path, {}, token=token).code
    patch = {"metadata": {"labels": {"a": "b"}}}
    return server.send(
        method, path, patch, content_type="application/merge-patch+json", token=token
    ).code


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", f"{_secrets(_SHOP)}/{_NAMED}", 200),
        ("GET", f"{_secrets(_SHOP)}/{_OTHER}", 403),
        ("GET", f"{_secrets(_BANK)}/{_NAMED}", 403),
        ("GET", f"{_secrets(deployment.NAMESPACE)}/{_OTHER}", 403),
        ("GET", _secrets(_SHOP), 403),
        ("GET", f"{_secrets(_SHOP)}?watch=true", 403),
        ("GET", "/api/v1/secrets", 403),
        ("PATCH", f"{_secrets(_SHOP)}/{_NAMED}", 403),
        ("DELETE", f"{_secrets(_SHOP)}/{_NAMED}", 403),
    ],
)
def test_agents_read_the_named_secret_and_nothing_else(
    server: ApiOnly, method: str, path: str, code: int
) -> None:
    assert _code(server, method, path) == code


def _write(server: ApiOnly, pair: tuple[bytes, bytes]) -> None:
    """As cert-manager does: a type is immutable, so the first one replaces what was there."""
    parts = zip(("tls.crt", "tls.key"), pair, strict=True)
    data = {name: base64.b64encode(part).decode() for name, part in parts}
    path = f"{_secrets(_SHOP)}/{_NAMED}"
    if (server.api.find(path) or {}).get("type") == "kubernetes.io/tls":
        server.api.patch(path, {"data": data})
        return
    server.api.delete(path)
    body: Json = {"metadata": {"name": _NAMED}, "type": "kubernetes.io/tls", "data": data}
    server.api.create(_secrets(_SHOP), body)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """The pod's namespace."""
    with sandbox_netns() as made:
        yield made


@pytest.fixture
async def followed(
    server: ApiOnly, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ProbeCertificates]:
    """Read with the account's token, more often than once a minute."""
    monkeypatch.setattr(certificates, "_REFRESH_SECONDS", 0.1)
    api = await ApiClient.open(str(server.kubeconfig("podgate")))
    async with running(ProbeCertificates(None, api)) as made:
        yield made
    await api.aclose()


async def test_probe_follows_its_secret(
    server: ApiOnly,
    followed: ProbeCertificates,
    authority: Authority,
    sandbox: Sandbox,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Without one there is no result, and a finding; a pod that trusts another authority from now
    on is content once the Secret has a certificate of it."""
    next_authority = Authority("next")

    async def probe(port: int) -> ProbeOutcome:
        names = followed.of("uid", _SHOP, {_NAME})
        plan = prober.plan(
            Probe(_HANDLER(port), timeout_seconds=5.0), (sandbox.v4,), certificates=names
        )
        return await prober.run_once(prober.Prober(asyncio.get_running_loop()), plan, sandbox.netns)

    async def until(port: int, holds: Callable[[ProbeOutcome], bool]) -> ProbeOutcome:
        changes = followed.changes.subscribe()
        outcome = await probe(port)
        async with asyncio.timeout(polling.PATIENCE_SECONDS):
            while not holds(outcome):
                await changes.next()
                outcome = await probe(port)
        return outcome

    async def apart(call: Callable[..., Any], *arguments: Any) -> Any:
        """In a thread, whose connection ends with it."""

        def run() -> Any:
            with contextlib.closing(server.api):
                return call(*arguments)

        return await asyncio.to_thread(run)

    def sentence() -> str:
        """Of the pod's finding."""
        problems = [PodProblem(part="certificate", text=text) for text in followed.problems("uid")]
        of_pod = findings.find(report(pod(problems=problems)))
        return "; ".join(one.sentence for one in of_pod if one.kind == kinds.PROBE_CERTIFICATE.name)

    def without_result(text: str) -> Callable[[ProbeOutcome], bool]:
        return lambda outcome: (
            outcome.error and outcome.lacks_certificate and text in (outcome.message)
        )

    path = f"{_secrets(_SHOP)}/{_NAMED}"
    await apart(server.api.delete, path)
    context = authority.demanding(tmp_path_factory.mktemp("server"))
    with serving(sandbox.listen(), context, OK) as port:
        await until(port, without_result("does not exist"))
        assert f"the Secret {_SHOP}/{_NAMED} with a client certificate does not exist" in sentence()

        await apart(_write, server, authority.issue())
        await until(port, lambda outcome: outcome.result is ProbeResult.SUCCESS)
        assert not sentence()

        renewed = next_authority.demanding(tmp_path_factory.mktemp("renewed"))
        with serving(sandbox.listen(), renewed, OK) as another:
            await until(another, without_result("unknown certificate authority"))
            await apart(_write, server, next_authority.issue())
            await until(another, lambda outcome: outcome.result is ProbeResult.SUCCESS)

        role = f"{_RBAC}/namespaces/{_SHOP}/rolebindings/podgate-probe-certificates"
        binding = await apart(server.api.get, role)
        await apart(server.api.delete, role)
        await until(port, without_result("bind a Role in its namespace that names it"))
        assert "may not read the Secret" in sentence()
        binding["metadata"] = {"name": binding["metadata"]["name"]}
        await apart(server.api.create, role.rpartition("/")[0], binding)
        await until(port, lambda outcome: not sentence())

        await apart(server.api.delete, path)
        await until(port, without_result("does not exist"))
