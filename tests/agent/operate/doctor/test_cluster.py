"""Findings about the cluster, by recorded answers; tests/cluster/test_doctor.py has a real one."""

import copy
import datetime
import pathlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.admin.finding_kinds import Severity
from agent.kube import connection
from agent.kube.client import ApiClient
from agent.operate.doctor import cluster
from agent.operate.doctor.cluster import RIGHTS
from agent.operate.doctor.results import Passed
from agent.policy import definition
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import opened, write_kubeconfig
from tests.agent.operate.doctor import answers
from tests.image import manifests

Json = dict[str, Any]
ROOT = pathlib.Path(__file__).parents[4]


class Answering:
    """An API server's answers to the doctor's requests."""

    def __init__(self) -> None:
        self.denied: set[tuple[str, str, str]] = set()
        """Group, resource with subresource, verb."""
        self.definitions: dict[str, Json] = {
            "hostaccesspolicies.policy.podgate.io": copy.deepcopy(definition.definition()),
            "nodereports.podgate.io": manifests.of_kind(
                "CustomResourceDefinition", "nodereports.podgate.io"
            ),
        }
        self.date: str | None = None
        self.failing = False
        """Whether all but /version is an error."""

    async def answer(self, request: web.Request) -> web.Response:
        headers = {"Date": self.date} if self.date is not None else {}
        if self.failing and request.path != "/version":
            return web.json_response({"message": "It fails."}, status=400)
        if request.path == answers.REVIEWS:
            attributes = (await request.json())["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (attributes["resource"], attributes["subresource"])))
            right = (attributes["group"], resource, attributes["verb"])
            answer = answers.review(attributes, is_allowed=right not in self.denied)
            return web.json_response(answer, status=201)
        if name := request.query.get("fieldSelector", "").removeprefix("metadata.name="):
            found = self.definitions.get(name)
            return web.json_response({"items": [found] if found else []})
        assert request.path == "/version"
        return web.json_response({"gitVersion": "v1.36.2"}, headers=headers)


@pytest.fixture
def answering() -> Answering:
    return Answering()


@pytest.fixture
async def api(
    answering: Answering, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ApiClient]:
    path = tmp_path / "api.sock"
    monkeypatch.setattr(connection, "connector", lambda tls: aiohttp.UnixConnector(str(path)))
    server = ApiServer()
    server.faults.append(answering.answer)
    async with server.running(path), opened(write_kubeconfig(tmp_path / "kubeconfig")) as made:
        yield made


async def found(api: ApiClient) -> list[Finding]:
    return [one for one in await cluster.check(api) if isinstance(one, Finding)]


async def test_all_in_order(api: ApiClient) -> None:
    assert await cluster.check(api) == [
        Passed("api-server", "The API server answers."),
        Passed("rights", "The account has all 29 rights that the agent needs."),
        Passed("definitions", "HostAccessPolicies and NodeReports are defined."),
        Passed("clock", "This node's time is the API server's."),
    ]


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: right.resource)
async def test_each_right_that_is_missing_is_named(
    api: ApiClient, answering: Answering, right: cluster.Right
) -> None:
    answering.denied = {(right.group, right.resource, right.verbs[-1])}
    (finding,) = await found(api)
    severity = Severity.BROKEN if right.is_needed else Severity.DEGRADED
    assert finding.severity == severity
    assert finding.sentence.startswith(f"The account may not {right.verbs[-1]} {right.resource}")
    assert finding.sentence.endswith(f": {right.effect}.")
    assert "apply" in finding.remedy


async def test_verbs_of_a_right_that_are_missing_are_one_finding(
    api: ApiClient, answering: Answering
) -> None:
    answering.denied = {
        *(("", "pods", verb) for verb in ("list", "watch")),
        ("", "pods/status", "patch"),
        ("podgate.io", "nodereports", "patch"),
    }
    assert [(one.kind, one.sentence) for one in await found(api)] == [
        (
            kinds.RIGHT_MISSING.name,
            "The account may not list and watch pods: labels and probes of pods are unknown.",
        ),
        (
            kinds.RIGHT_MISSING.name,
            "The account may not patch pods/status: pods with readiness gates do not get Ready.",
        ),
        (
            kinds.RIGHT_MISSING_FEATURE.name,
            "The account may not patch nodereports.podgate.io: policies have no status.",
        ),
    ]


async def test_what_cannot_be_read_is_named_beside_the_rest(
    api: ApiClient, answering: Answering
) -> None:
    answering.failing = True
    results = await cluster.check(api)
    assert [one.kind if isinstance(one, Finding) else one.check for one in results] == [
        "api-server",
        kinds.RIGHT_MISSING_FEATURE.name,
        kinds.DEFINITION_OTHER.name,
        "clock",
    ]
    texts = [one.sentence for one in results if isinstance(one, Finding)]
    assert texts[0].startswith("The account's rights cannot be reviewed: ")
    assert texts[1].startswith("Definitions cannot be read: ")


def test_page_names_every_right_of_an_agent_s_token() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    section = page.partition("## The API server's side")[2].partition("The controller's token")[0]
    assert {right.resource for right in RIGHTS} <= set(re.findall(r"`([a-z/]+)`", section))


def test_rights_are_those_that_the_manifests_grant() -> None:
    granted = {
        (group, resource, verb)
        for rule in manifests.of_kind("ClusterRole")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {(one.group, one.resource, verb) for one in RIGHTS for verb in one.verbs} == granted


def _without_a_field(definition: Json) -> None:
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["spec"]["properties"]["nodeSelector"]


def _of_another_version(definition: Json) -> None:
    definition["spec"]["versions"][0]["name"] = "v1"


@pytest.mark.parametrize(
    ("name", "change", "severity", "text"),
    [
        (
            "hostaccesspolicies.policy.podgate.io",
            _without_a_field,
            Severity.DEGRADED,
            "The definition of HostAccessPolicies is of another version of podgate",
        ),
        (
            "hostaccesspolicies.policy.podgate.io",
            _of_another_version,
            Severity.BROKEN,
            "HostAccessPolicies are defined in version v1, not in v1alpha1.",
        ),
        (
            "nodereports.podgate.io",
            None,
            Severity.BROKEN,
            "NodeReports are not defined in this cluster.",
        ),
    ],
)
async def test_definition_that_does_not_fit_is_found(
    api: ApiClient,
    answering: Answering,
    name: str,
    change: Callable[[Json], None] | None,
    severity: Severity,
    text: str,
) -> None:
    if change is None:
        del answering.definitions[name]
    else:
        change(answering.definitions[name])
    (finding,) = await found(api)
    assert finding.severity == severity
    assert finding.sentence.startswith(text)


async def test_clock_is_compared_with_the_api_servers(api: ApiClient, answering: Answering) -> None:
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    answering.date = f"{long_ago:%a, %d %b %Y %H:%M:%S} GMT"
    (finding,) = await found(api)
    assert finding.severity == Severity.DEGRADED
    assert "s ahead of the API server's" in finding.sentence
    answering.date = "none"
    (finding,) = await found(api)
    assert "sends no time" in finding.sentence


@pytest.mark.parametrize(("ahead", "is_wrong"), [(9, False), (-9, False), (11, True), (-11, True)])
def test_some_seconds_of_a_clock_are_none(ahead: float, *, is_wrong: bool) -> None:
    assert isinstance(cluster.clock(ahead), Finding) is is_wrong


@pytest.mark.parametrize(
    ("ahead", "text"),
    [(11.4, "11 s ahead of"), (-70.0, "70 s behind"), (3600.0, "3600 s ahead of")],
)
def test_clock_has_its_distance(ahead: float, text: str) -> None:
    found = cluster.clock(ahead)
    assert isinstance(found, Finding)
    assert found.sentence == (
        f"This node's clock is {text} the API server's: times in conditions, events and drops are "
        "wrong."
    )


async def test_api_server_that_does_not_answer_is_one_problem(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "missing.sock")
    monkeypatch.setattr(connection, "connector", lambda tls: aiohttp.UnixConnector(missing))
    async with opened(write_kubeconfig(tmp_path / "kubeconfig")) as client:
        (finding,) = await cluster.check(client)
    assert isinstance(finding, Finding)
    assert finding.kind == kinds.API_SERVER_UNREACHABLE.name
