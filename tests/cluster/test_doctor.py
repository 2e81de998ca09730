"""`podgate doctor` on a real API server: the account's rights, the definitions, and the clock.

What the API server answers is recorded for the unit tests; PODGATE_TEST_RECORD=1 records it again.
"""

import asyncio
import json
import os
from collections.abc import Iterator

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.admin.finding_kinds import Kind, Severity
from agent.kube.client import ApiClient
from agent.operate.doctor import cluster
from agent.operate.doctor.results import Passed, Result
from tests import polling
from tests.agent.operate.doctor import answers
from tests.cluster import api_only, conftest, deployment
from tests.cluster.api_only import ApiOnly
from tests.image import manifests

pytestmark = pytest.mark.kernel
_APPLIED = (
    *("Namespace", "CustomResourceDefinition", "ServiceAccount"),
    *("ClusterRole", "ClusterRoleBinding"),
)
RIGHTS = (kinds.RIGHT_MISSING, kinds.RIGHT_MISSING_FEATURE)
_POLICIES = "hostaccesspolicies.policy.podgate.io"
_DEFINITIONS = deployment.PATHS["CustomResourceDefinition"]


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    """An API server with podgate's definitions and rights."""
    directory = tmp_path_factory.mktemp("doctor")
    with api_only.running(conftest.binaries(), directory) as made:
        for thing in manifests.applied():
            if thing["kind"] in _APPLIED:
                made.api.create(deployment.PATHS[thing["kind"]], thing)
        yield made


def results(server: ApiOnly) -> list[Result]:
    """With the agent's account."""

    async def check() -> list[Result]:
        api = await ApiClient.open(str(server.kubeconfig("podgate")))
        try:
            return await cluster.check(api)
        finally:
            await api.aclose()

    return asyncio.run(check())


def findings(server: ApiOnly, *of: Kind) -> list[Finding]:
    names = {kind.name for kind in of}
    return [one for one in results(server) if isinstance(one, Finding) and one.kind in names]


def until_all_ok(server: ApiOnly) -> list[Passed]:
    """RBAC's caches follow changes some moments later."""

    def check() -> list[Passed] | None:
        found = results(server)
        passed = [one for one in found if isinstance(one, Passed)]
        return passed if len(passed) == len(found) else None

    made = polling.wait_until("all is in order", check)
    assert made is not None
    return made


def test_account_of_the_manifests_has_all_rights_and_definitions(server: ApiOnly) -> None:
    passed = [one.check for one in until_all_ok(server)]
    assert passed == ["api-server", "rights", "definitions", "clock"]


def test_account_without_its_role_lacks_all_rights(server: ApiOnly) -> None:
    until_all_ok(server)
    binding = f"{deployment.PATHS['ClusterRoleBinding']}/podgate"
    (of_agent,) = (
        thing
        for thing in manifests.applied()
        if (thing["kind"], thing["metadata"]["name"]) == ("ClusterRoleBinding", "podgate")
    )
    server.api.delete(binding)
    try:
        lacking = polling.wait_until(
            "all rights are missing",
            lambda: len(found := findings(server, *RIGHTS)) == len(cluster.RIGHTS) and found,
        )
        assert isinstance(lacking, list)
        needed = [one.sentence for one in lacking if one.severity == Severity.BROKEN]
        assert (
            "The account may not patch pods/status: pods with readiness gates do not get Ready."
            in needed
        )
        (unread,) = findings(server, kinds.DEFINITION_OTHER)
        assert unread.sentence.startswith("Definitions cannot be read: ")
    finally:
        server.api.create(deployment.PATHS["ClusterRoleBinding"], of_agent)


def test_definition_that_is_missing_or_of_another_version_is_found(server: ApiOnly) -> None:
    until_all_ok(server)
    stored = server.api.get(f"{_DEFINITIONS}/{_POLICIES}")
    changed = json.loads(json.dumps(stored["spec"]["versions"]))
    del changed[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["nodeSelector"]
    server.api.patch(f"{_DEFINITIONS}/{_POLICIES}", {"spec": {"versions": changed}})
    (finding,) = findings(server, kinds.DEFINITION_OTHER)
    assert "is of another version of podgate" in finding.sentence
    server.api.delete(f"{_DEFINITIONS}/{_POLICIES}")
    polling.wait_until("it is gone", lambda: server.api.find(f"{_DEFINITIONS}/{_POLICIES}") is None)
    (finding,) = findings(server, kinds.DEFINITION_MISSING)
    assert finding.sentence == "HostAccessPolicies are not defined in this cluster."
    (own,) = (thing for thing in manifests.applied() if thing["metadata"]["name"] == _POLICIES)
    server.api.create(_DEFINITIONS, own)
    until_all_ok(server)


def test_answers_are_those_that_are_recorded(server: ApiOnly) -> None:
    until_all_ok(server)
    token = server.token("podgate")
    served = {
        name: answers.constant(server.send("POST", answers.REVIEWS, body, token=token).body)
        for name, body in answers.requests().items()
    }
    if os.environ.get("PODGATE_TEST_RECORD"):
        answers.FILE.write_text(json.dumps(served, indent=1) + "\n", encoding="utf-8")
    assert served == answers.recorded()
