"""An API server accepts what the chart renders, and describes its kinds as recorded."""

import json
from collections.abc import Iterator

import pytest

from tests.chart import examples, kubernetes, rendering
from tests.cluster import api_only, conftest, deployment
from tests.cluster.api import ApiError
from tests.cluster.api_only import ApiOnly

pytestmark = pytest.mark.kernel
# Unknown and repeated fields are errors instead of warnings.
_STRICT = {"dryRun": "All", "fieldValidation": "Strict"}


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    with api_only.running(conftest.binaries(), tmp_path_factory.mktemp("api")) as made:
        namespace = {"metadata": {"name": deployment.NAMESPACE}}
        made.api.create(deployment.PATHS["Namespace"], namespace)
        yield made


@pytest.mark.parametrize("name", examples.VALUES)
def test_every_object_is_accepted_without_an_unknown_field(server: ApiOnly, name: str) -> None:
    for thing in rendering.objects(examples.VALUES[name]):
        if thing["apiVersion"] in kubernetes.DEFINED:
            continue  # This server has no definitions of it.
        if thing["kind"] == "Namespace":
            # It exists.
            thing["metadata"]["name"] = "another"
        server.api.create(deployment.PATHS[thing["kind"]], thing, **_STRICT)


def test_an_unknown_field_is_rejected(server: ApiOnly) -> None:
    (thing,) = (one for one in rendering.objects() if one["kind"] == "DaemonSet")
    thing["spec"]["template"]["spec"]["dnsPolcy"] = "Default"
    with pytest.raises(ApiError, match="unknown field"):
        server.api.create(deployment.PATHS[thing["kind"]], thing, **_STRICT)


def test_recorded_schemas_are_those_of_the_server(server: ApiOnly) -> None:
    documents = {path: server.api.get(f"/openapi/v3/{path}") for path in kubernetes.PATHS.values()}
    things = [one for values in examples.VALUES.values() for one in rendering.objects(values)]
    kinds = {(thing["apiVersion"], thing["kind"]) for thing in things}
    found = kubernetes.reduced(documents, kinds)
    recorded = json.loads(kubernetes.RECORDED.read_text(encoding="utf-8"))
    assert kinds >= {("apps/v1", "DaemonSet"), ("v1", "ResourceQuota")}
    assert recorded == found, "another version of Kubernetes, or a kind that is new in the chart"
