"""The Job that installs the webhook's certificate: its requests, and that its rights suffice."""

import asyncio
import base64
import datetime
import json
from typing import Any

import pytest
import yaml
from aiohttp import web

from agent.controller import certificates, webhook_certificate
from agent.controller.webhook_certificate import CONFIGURATIONS, OBSOLETE, WebhookCertificateError
from agent.kube import self_signed
from agent.kube.client import ApiClient
from tests.agent.controller import admission_cases as cases
from tests.agent.kube.apiserver import ApiServer, error_response
from tests.image import manifests

pytestmark = pytest.mark.looptime
GROUP = "/apis/admissionregistration.k8s.io/v1"
SECRET = webhook_certificate.secret_path("podgate")
START = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


class Cluster:
    """What a server stores: the chart's webhook configurations, a Secret, bindings."""

    def __init__(self, server: ApiServer) -> None:
        self.bundles: dict[str, dict[str, str]] = {
            path: dict.fromkeys(names, "") for path, names in CONFIGURATIONS.items()
        }
        self.secret: cases.Json | None = None
        self.others = {
            *(f"{GROUP}/{path}" for path in OBSOLETE),
            *webhook_certificate.own_bindings("podgate"),
        }
        self.order: list[str] = []
        """What was written, by path."""
        server.faults.append(self._answer)

    @property
    def served(self) -> bytes:
        assert self.secret is not None
        return base64.b64decode(self.secret["data"]["tls.crt"])

    def trusted(self) -> set[bytes]:
        return {
            base64.b64decode(bundle) for found in self.bundles.values() for bundle in found.values()
        }

    async def _answer(self, request: web.Request) -> web.StreamResponse | None:
        if request.method != "GET":
            self.order.append(request.path)
        if request.path == SECRET:
            return await self._answer_secret(request)
        path = request.path.removeprefix(f"{GROUP}/")
        if request.method == "PATCH" and path in self.bundles:
            for one in json.loads(await request.read())["webhooks"]:
                assert one["name"] in self.bundles[path]
                self.bundles[path][one["name"]] = one["clientConfig"]["caBundle"]
            return web.json_response({})
        if request.method == "DELETE" and request.path in self.others:
            self.others.remove(request.path)
            return web.json_response({})
        return error_response(404, "NotFound")

    async def _answer_secret(self, request: web.Request) -> web.StreamResponse:
        if request.method == "PATCH":
            self.secret = json.loads(await request.read())
            self.secret["metadata"]["resourceVersion"] = "7"
        if self.secret is None:
            return error_response(404, "NotFound")
        return web.json_response(self.secret)


async def install(api: ApiClient, *, after: datetime.timedelta = DAY * 0) -> None:
    await webhook_certificate.install(api, "podgate", [*CONFIGURATIONS], now=lambda: START + after)


async def test_api_server_trusts_the_certificate_before_it_is_stored(
    server: ApiServer, api: ApiClient
) -> None:
    cluster = Cluster(server)
    await install(api)
    assert cluster.trusted() == {cluster.served}
    configurations = [f"{GROUP}/{path}" for path in CONFIGURATIONS]
    assert cluster.order[: len(configurations) + 1] == [*configurations, SECRET]


async def test_upgrade_keeps_the_certificate_and_writes_it_into_new_webhooks(
    server: ApiServer, api: ApiClient
) -> None:
    cluster = Cluster(server)
    await install(api)
    served = cluster.served
    for found in cluster.bundles.values():
        found.update(dict.fromkeys(found, ""))
    await install(api, after=DAY)
    assert cluster.served == served
    assert cluster.trusted() == {served}


async def test_upgrade_from_a_version_whose_controller_wrote_webhooks(
    server: ApiServer, api: ApiClient
) -> None:
    """Replicas serve its certificate until the kubelet has written the new one."""
    cluster = Cluster(server)
    old = self_signed.certificate(
        "podgate-controller", certificates.service_names("podgate"), START, 90 * DAY
    )
    data = {"tls.crt": old.certificate, "tls.key": old.key, "next.crt": b""}
    cluster.secret = {
        "metadata": {"resourceVersion": "3"},
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }
    await install(api, after=DAY)
    assert cluster.served != old.certificate
    assert cluster.trusted() == {cluster.served + old.certificate}
    assert not cluster.others


async def test_rights_are_given_up_last_and_only_after_success(
    server: ApiServer, api: ApiClient
) -> None:
    cluster = Cluster(server)
    bindings = list(webhook_certificate.own_bindings("podgate"))
    failing = GROUP + "/" + OBSOLETE[-1]

    async def fail(request: web.Request) -> web.StreamResponse | None:
        if request.method == "DELETE" and request.path == failing:
            return error_response(503, "ServiceUnavailable")
        return None

    server.faults.insert(0, fail)
    with pytest.raises(WebhookCertificateError, match="the Job tries again"):
        await install(api)
    assert set(bindings) <= cluster.others
    server.faults.remove(fail)
    await install(api)
    assert not cluster.others
    assert cluster.order[-2:] == bindings


async def test_webhooks_that_kubectl_has_not_applied_yet_are_waited_for(
    server: ApiServer, api: ApiClient
) -> None:
    cluster = Cluster(server)
    path, names = cluster.bundles.popitem()
    task = asyncio.create_task(install(api))
    await asyncio.sleep(30)
    assert cluster.secret is None
    cluster.bundles[path] = names
    await task
    assert cluster.trusted() == {cluster.served}


async def test_missing_webhooks_are_an_error(server: ApiServer, api: ApiClient) -> None:
    cluster = Cluster(server)
    cluster.bundles.clear()
    with pytest.raises(WebhookCertificateError):
        await install(api)
    assert cluster.secret is None


async def test_roles_of_the_job_grant_its_requests_by_name(
    server: ApiServer, api: ApiClient
) -> None:
    Cluster(server)
    await install(api)
    rules: list[dict[str, Any]] = [
        rule
        for kind in ("Role", "ClusterRole")
        for rule in manifests.of_kind(kind, webhook_certificate.NAME)["rules"]
    ]
    used = set()
    for request in server.received:
        *_, resource, name = request.path.split("/")
        verb = {"PATCH": "patch", "DELETE": "delete", "GET": "get"}[request.method]
        used.add((resource, name, verb))
        assert any(
            resource in rule["resources"]
            and name in rule["resourceNames"]
            and verb in rule["verbs"]
            for rule in rules
        ), request
    granted = {
        (resource, name, verb)
        for rule in rules
        for resource in rule["resources"]
        for name in rule["resourceNames"]
        for verb in rule["verbs"]
    }
    # Server-side apply creates what is missing.
    assert granted - used == {("secrets", certificates.SECRET_NAME, "create")}


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
    answers = json.dumps([known["agent"]])
    found = [sentence for sentence in sentences if sentence in answers]
    assert len(found) >= 3
    for group in ("host denials", "host warnings", "injected", "probe specs"):
        written = {
            "host denials": cases.HOSTS,
            "host warnings": cases.HOSTS,
            "injected": cases.INJECTED,
            "probe specs": cases.PROBE_SPECS,
        }[group]
        assert known[group].keys() == {case.name for case in written}
