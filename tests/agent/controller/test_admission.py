"""The admission objects that the controller applies, and its requests."""

import asyncio
import base64
import datetime
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import yaml
from aiohttp import web

from agent.controller import certificates
from agent.controller.admission import Admission
from agent.kube.client import APPLY, ApiClient
from tests.agent.controller import admission_cases as cases
from tests.agent.controller.leases import recorded
from tests.agent.kube.apiserver import ApiServer, RecordedRequest, error_response
from tests.image import manifests

pytestmark = pytest.mark.looptime
GROUP = "/apis/admissionregistration.k8s.io/v1"
SECRET = "/api/v1/namespaces/podgate/secrets/podgate-controller-tls"
ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/podgate-controller"
START = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)


class Stored:
    """What was applied, by path, on a server that answers as recorded."""

    def __init__(self, server: ApiServer, *, has_policies: bool) -> None:
        self.objects: dict[str, cases.Json] = {}
        self._discovery = recorded("discovery" if has_policies else "discovery-without-policies")
        server.faults.append(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse | None:
        if request.method == "GET" and request.path == GROUP:
            return web.json_response(self._discovery["body"])
        if request.method == "GET" and request.path == ROLE:
            return web.json_response({"metadata": {"uid": "uid-role"}})
        if request.method == "PATCH":
            self.objects[request.path] = json.loads(await request.read())
            return web.json_response(self.objects[request.path])
        if request.path in self.objects:
            found = self.objects[request.path]
            found["metadata"]["resourceVersion"] = "7"
            return web.json_response(found)
        return error_response(404, "NotFound")


@asynccontextmanager
async def running(api: ApiClient, *, speed: float = 1.0) -> AsyncIterator[None]:
    """speed: of the calendar, in seconds per second of the loop."""
    loop = asyncio.get_running_loop()

    def now() -> datetime.datetime:
        return START + datetime.timedelta(seconds=speed * loop.time())

    task = asyncio.create_task(Admission(api, "podgate", now=now, jitter=lambda: 0.5).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _applied(server: ApiServer) -> list[RecordedRequest]:
    return server.patches()


@pytest.mark.parametrize("has_policies", [True, False])
async def test_injection_is_by_policies_where_the_api_server_has_them(
    server: ApiServer, api: ApiClient, has_policies: bool
) -> None:
    stored = Stored(server, has_policies=has_policies)
    async with running(api):
        await asyncio.sleep(10)
    kinds = {thing["kind"] for thing in stored.objects.values()}
    assert ("MutatingAdmissionPolicy" in kinds) is has_policies
    assert ("MutatingWebhookConfiguration" in kinds) is not has_policies
    assert "ValidatingWebhookConfiguration" in kinds
    for request in _applied(server):
        assert request.headers["Content-Type"] == APPLY
        assert request.query == {"fieldManager": "podgate-controller", "force": "true"}
    for path, thing in stored.objects.items():
        if path != SECRET:
            assert thing["metadata"]["ownerReferences"][0]["uid"] == "uid-role"


async def test_api_server_trusts_what_is_served_for_a_year(
    server: ApiServer, api: ApiClient
) -> None:
    stored = Stored(server, has_policies=False)
    path = f"{GROUP}/validatingwebhookconfigurations/podgate-probe-spec"
    served = []
    trusted = []
    # Three days for each pass, in which a minute passes: harder than to keep up with the calendar.
    async with running(api, speed=3 * 1440.0):
        for _ in range(122):
            await asyncio.sleep(60)
            found = certificates.read(json.dumps(stored.objects[SECRET]).encode())
            assert found is not None
            served.append(found.serving.certificate)
            client = stored.objects[path]["webhooks"][0]["clientConfig"]
            trusted.append(base64.b64decode(client["caBundle"]))
    # By the configuration of the pass before.
    passes = enumerate(zip(served[1:], trusted, strict=False))
    assert [number for number, (certificate, bundle) in passes if certificate not in bundle] == []
    assert len(set(served)) == 7


async def test_failing_api_server_gets_the_same_requests_later(
    server: ApiServer, api: ApiClient
) -> None:
    is_away = True

    async def fail(request: web.Request) -> web.StreamResponse | None:
        return error_response(503, "ServiceUnavailable") if is_away else None

    server.faults.append(fail)
    stored = Stored(server, has_policies=True)
    async with running(api):
        await asyncio.sleep(600)
        assert not stored.objects
        is_away = False
        await asyncio.sleep(120)
        assert len(stored.objects) == 6
    assert len([one for one in server.received if one.at < 600]) < 30


async def test_roles_of_the_controller_grant_its_requests_by_name(
    server: ApiServer, api: ApiClient
) -> None:
    for has_policies in (True, False):
        server.faults.clear()
        Stored(server, has_policies=has_policies)
        async with running(api):
            await asyncio.sleep(70)
    rules = [
        rule
        for kind in ("Role", "ClusterRole")
        for rule in manifests.of_kind(kind, "podgate-controller")["rules"]
    ]
    verbs = {"PATCH": "patch", "DELETE": "delete", "GET": "get"}
    # Discovery is for every account.
    requests = [request for request in server.received if request.path != GROUP]
    assert {request.method for request in requests} == verbs.keys()
    for request in requests:
        *_, resource, name = request.path.split("/")
        assert any(
            resource in rule["resources"]
            and name in rule.get("resourceNames", ())
            and verbs[request.method] in rule["verbs"]
            for rule in rules
        ), request


def test_answers_were_recorded_with_the_sentences_of_the_manifests() -> None:
    """Otherwise tests/cluster/test_admission.py is to be run with PODGATE_TEST_RECORD=1."""
    text = (manifests.DIRECTORY / "guards.yaml").read_text(encoding="utf-8")
    known = cases.recorded()
    sentences = [
        validation["message"]
        for thing in yaml.safe_load_all(text)
        for validation in thing["spec"].get("validations", ())
        if "message" in validation
    ]
    answers = json.dumps([known["agent"], known["frozen"]])
    found = [sentence for sentence in sentences if sentence in answers]
    assert len(found) >= 4
    for group in ("host denials", "host warnings", "injected", "probe specs"):
        written = {
            "host denials": cases.HOSTS,
            "host warnings": cases.HOSTS,
            "injected": cases.INJECTED,
            "probe specs": cases.PROBE_SPECS,
        }[group]
        assert known[group].keys() == {case.name for case in written}
