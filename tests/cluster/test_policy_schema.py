"""A real API server on policies: its answers are those that tests/agent/policy/recorded has.

PODGATE_TEST_RECORD=1 records them again, after a change of the schema.
"""

import functools
import json
import os
import pathlib
from collections.abc import Iterator

import pytest
import yaml

from agent import labels
from agent.policy import definition
from tests import polling
from tests.agent.policy import answers, egress_answers
from tests.cluster import bare_api
from tests.cluster.api import Api, ApiError, Json
from tests.cluster.conftest import binaries

pytestmark = pytest.mark.kernel
_PATH = "/apis/policy.podgate.io/v1alpha1/hostaccesspolicies"
_EGRESS_PATH = "/apis/policy.podgate.io/v1alpha1/hostegresspolicies"
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def api(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API server with the definitions."""
    directory: pathlib.Path = tmp_path_factory.mktemp("api") / "server"
    with bare_api.running(binaries(), directory) as server:
        for kind, path in ((labels.POLICY_KIND, _PATH), (labels.EGRESS_KIND, _EGRESS_PATH)):
            server.api.create(_DEFINITIONS, yaml.safe_load(definition.manifest(kind)))
            served = functools.partial(_is_served, server.api, path)
            polling.wait_until("policies are served", served)
        yield server.api


def _is_served(api: Api, path: str) -> bool:
    try:
        return api.find(path) is not None
    except ApiError as error:
        # 429: storage is (re)initializing.
        if error.code != 429:
            raise
        return False


def _answer(api: Api, spec: Json, kind: str, path: str) -> Json:
    """The stored spec, or the code and message of the rejection."""
    body = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": "a-policy"},
        "spec": spec,
    }
    try:
        stored: Json = api.create(path, body, fieldValidation="Strict", dryRun="All")["spec"]
    except ApiError as error:
        return {"code": error.code, "message": str(error)}
    return {"stored": stored}


def test_answers_are_those_that_are_recorded(api: Api) -> None:
    served = {
        name: {"spec": spec, **_answer(api, spec, labels.POLICY_KIND, _PATH)}
        for name, spec in answers.specs().items()
    }
    if os.environ.get("PODGATE_TEST_RECORD"):
        answers.FILE.write_text(
            json.dumps({"schema": answers.schema_digest(), "answers": served}, indent=1) + "\n"
        )
    assert served == answers.recorded()["answers"]


def test_answers_to_egress_policies_are_those_that_are_recorded(api: Api) -> None:
    served = {
        name: {"spec": spec, **_answer(api, spec, labels.EGRESS_KIND, _EGRESS_PATH)}
        for name, spec in egress_answers.specs().items()
    }
    if os.environ.get("PODGATE_TEST_RECORD"):
        recording = {"schema": egress_answers.schema_digest(), "answers": served}
        egress_answers.FILE.write_text(json.dumps(recording, indent=1) + "\n")
    assert served == egress_answers.recorded()["answers"]


def test_status_is_separate_from_the_spec(api: Api) -> None:
    spec = {"pods": {"podSelector": {}}, "from": [{"kernel": {}}]}
    status = {
        "observedGeneration": 1,
        "nodes": {"selected": 3, "programmed": 2, "failed": 1},
        "conditions": [
            {
                "type": "Programmed",
                "status": "False",
                "reason": "GateFull",
                "message": "node1: 33 rules match pod shop/web.",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "observedGeneration": 1,
            }
        ],
    }
    body = {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": "with-status"},
        "spec": spec,
        "status": status,
    }
    created = api.create(_PATH, body, fieldValidation="Strict")
    assert "status" not in created
    api.patch(f"{_PATH}/with-status/status", {"status": status})
    found = api.get(f"{_PATH}/with-status")
    assert (found["status"], found["metadata"]["generation"]) == (status, 1)
    api.delete(f"{_PATH}/with-status")
