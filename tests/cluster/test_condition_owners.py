"""ConditionOwners on a real API server: the rules of their definition, which conditions the agents'
token may write, and which new pods get readiness gates."""

import itertools
from collections.abc import Iterator

import pytest

from tests import polling
from tests.chart import rendering
from tests.cluster import api_only, conftest, deployment
from tests.cluster.api import ApiError, Json
from tests.cluster.api_only import ApiOnly

pytestmark = pytest.mark.kernel
_DOMAIN = "gpu.example.com"
_VALUES = {"conditions": {"domains": [_DOMAIN]}, "injection": {"mechanism": "policies"}}
_OWNERS = "/apis/podgate.io/v1alpha1/conditionowners"
_STRATEGIC = "application/strategic-merge-patch+json"
_KINDS = {
    *(
        "Namespace",
        "CustomResourceDefinition",
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
    ),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    *("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"),
}
_OF_PODGATE = "Ready to compute. (sandbox 0123456789ab, boot 0123abcd)"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    """With podgate's objects, but for what runs on nodes or needs its controller."""
    directory = tmp_path_factory.mktemp("owners")
    with api_only.running(conftest.binaries(), directory) as made:
        namespace = {"metadata": {"name": deployment.NAMESPACE}}
        made.api.create("/api/v1/namespaces", namespace)
        for thing in rendering.objects(_VALUES, service="kubectl"):
            if thing["kind"] in _KINDS:
                made.api.create(deployment.PATHS[thing["kind"]], thing)
        for name in ("default", deployment.NAMESPACE):
            account = {"metadata": {"name": "default"}}
            made.api.create(f"/api/v1/namespaces/{name}/serviceaccounts", account)
        for name in ("node1", "node2"):
            made.api.create("/api/v1/nodes", {"kind": "Node", "metadata": {"name": name}})
        polling.wait_until("owners are served", lambda: _is_served(made))
        agent = _pod(made, deployment.NAMESPACE, account="podgate")
        other = _pod(made, node="node2")
        token = made.token("podgate", pod=made.api.get(agent))
        polling.wait_until(
            "the guard is in force",
            lambda: made.send("PATCH", f"{other}/status", _condition(), **_by(token)).code == 403,
        )
        yield made


def _by(token: str) -> Json:
    return {"content_type": _STRATEGIC, "token": token}


def _is_served(server: ApiOnly) -> bool:
    try:
        return server.api.find(_OWNERS) is not None
    except ApiError as error:
        # 429: storage is (re)initializing.
        if error.code != 429:
            raise
        return False


def _pod(
    server: ApiOnly, namespace: str = "default", *, node: str = "node1", account: str = "default"
) -> str:
    """The path of a new pod."""
    body = {
        "metadata": {"name": f"pod-{next(_numbers)}"},
        "spec": {
            "nodeName": node,
            "serviceAccountName": account,
            "containers": [{"name": "app", "image": "app"}],
        },
    }
    path = f"/api/v1/namespaces/{namespace}/pods"
    return f"{path}/{server.api.create(path, body)['metadata']['name']}"


def _condition(kind: str = f"{_DOMAIN}/attached", **fields: str) -> Json:
    found = {"type": kind, "status": "True", "reason": "Attached", **fields}
    return {"status": {"conditions": [found]}}


def _owner(name: str = _DOMAIN, **fields: object) -> Json:
    return {
        "apiVersion": "podgate.io/v1alpha1",
        "kind": "ConditionOwner",
        "metadata": {"name": name},
        "spec": {"reporters": [{"user": 1001}], **fields},
    }


def test_defaults_are_stored(server: ApiOnly) -> None:
    stored = server.api.create(_OWNERS, _owner(), fieldValidation="Strict", dryRun="All")
    assert stored["spec"] == {
        "reporters": [{"user": 1001}],
        "staleAfterSeconds": 30,
        "whenStale": "Unknown",
        "maxPerPod": 4,
        "changesPerSecond": 20,
    }


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        (_owner("podgate.io"), "this domain is reserved"),
        (_owner("node.podgate.io"), "this domain is reserved"),
        (_owner("storage.k8s.io"), "this domain is reserved"),
        (_owner("kubernetes.io"), "this domain is reserved"),
        (_owner("gpu"), "the name is the domain"),
        (_owner(reporters=[]), "at least 1 items"),
        (_owner(reporters=[{}]), "at least 1 properties"),
        (_owner(reporters=[{"usr": 1}]), 'unknown field "spec.reporters[0].usr"'),
        (_owner(reporters=[{"systemdUnit": "gpu"}]), "should match"),
        (_owner(whenStale="True"), "Unsupported value"),
        (_owner(maxPerPod=17), "less than or equal to 16"),
        (_owner(inject={"types": ["healthy"]}), "spec.inject"),
        (_owner(inject={"types": [], "podSelector": {}}), "at least 1 items"),
        (_owner(inject={"types": ["a/b"], "podSelector": {}}), "should match"),
    ],
)
def test_wrong_owners_are_rejected(server: ApiOnly, owner: Json, words: str) -> None:
    with pytest.raises(ApiError, match=r"4\d\d") as raised:
        server.api.create(_OWNERS, owner, fieldValidation="Strict", dryRun="All")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("node", "body", "code"),
    [
        ("node1", _condition(), 200),
        ("node1", _condition(f"other.{_DOMAIN}/attached"), 403),
        ("node1", _condition("storage.example.com/attached"), 403),
        ("node1", _condition("Ready"), 403),
        ("node2", _condition(), 403),
    ],
    ids=["own", "domain below", "other domain", "kubelet's", "other node"],
)
def test_agents_write_conditions_of_listed_domains(
    server: ApiOnly, node: str, body: Json, code: int
) -> None:
    token = server.token("podgate", pod=server.api.get(_agent(server)))
    pod = _pod(server, node=node)
    assert server.send("PATCH", f"{pod}/status", body, **_by(token)).code == code


def test_agents_remove_what_they_wrote_also_of_a_domain_that_is_listed_no_more(
    server: ApiOnly,
) -> None:
    token = server.token("podgate", pod=server.api.get(_agent(server)))
    pod = _pod(server)
    for kind, message in (
        (f"{_DOMAIN}/attached", _OF_PODGATE),
        ("old.example.com/attached", _OF_PODGATE),
        ("foreign.example.com/attached", "Written by its owner."),
    ):
        server.api.patch(
            f"{pod}/status", _condition(kind, message=message), content_type=_STRATEGIC
        )

    def removed(kind: str) -> int:
        body = {"status": {"conditions": [{"type": kind, "$patch": "delete"}]}}
        return server.send("PATCH", f"{pod}/status", body, **_by(token)).code

    assert removed("foreign.example.com/attached") == 403
    assert removed(f"{_DOMAIN}/attached") == 200
    assert removed("old.example.com/attached") == 200
    left = server.api.get(pod)["status"]["conditions"]
    assert [one["type"] for one in left] == ["foreign.example.com/attached"]


def _agent(server: ApiOnly) -> str:
    path = f"/api/v1/namespaces/{deployment.NAMESPACE}/pods"
    (name,) = (one["metadata"]["name"] for one in server.api.get(path)["items"])
    return f"{path}/{name}"


def _gates(server: ApiOnly, namespace: str = "default", **fields: object) -> list[str]:
    """Of a pod as the API server would create it. fields: of its metadata, and of its spec those
    that begin with `spec_`."""
    spec = {name.removeprefix("spec_"): one for name, one in fields.items() if "spec_" in name}
    body = {
        "metadata": {"name": "new", **{n: one for n, one in fields.items() if "spec_" not in n}},
        "spec": {"containers": [{"name": "app", "image": "app"}], **spec},
    }
    answer = server.send("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", body)
    assert answer.code == 201, answer.body
    return [one["conditionType"] for one in answer.body["spec"].get("readinessGates", ())]


def test_owner_adds_readiness_gates_to_new_pods_that_it_selects(server: ApiOnly) -> None:
    """Each type once, only those of its domain, and only where the chart lists that."""
    api, labels = server.api, {"gpu": "a100"}
    other, unlisted = f"{_DOMAIN}/tested", "disk.example.com"
    team = {"metadata": {"name": "team", "labels": {"tenant": "yes"}}}
    api.create("/api/v1/namespaces", team)
    api.create("/api/v1/namespaces/team/serviceaccounts", {"metadata": {"name": "default"}})
    assert _gates(server, labels=labels) == []
    inject = {"types": ["healthy", "tested"], "podSelector": {"matchLabels": labels}}
    api.create(_OWNERS, _owner(inject=inject))
    everything = {"types": ["mounted"], "podSelector": {}}
    api.create(_OWNERS, _owner(unlisted, inject=everything))
    try:
        both = [f"{_DOMAIN}/healthy", other]
        polling.wait_until("injection", lambda: _gates(server, labels=labels) == both)
        assert _gates(server, labels={"gpu": "t4"}) == []
        assert _gates(server) == []
        has_one: Json = {"labels": labels, "spec_readinessGates": [{"conditionType": other}]}
        assert _gates(server, **has_one) == [other, both[0]]
        assert _gates(server, labels=labels, spec_hostNetwork=True) == []
        assert _gates(server, deployment.NAMESPACE, labels=labels) == []

        selector = {"matchLabels": {"tenant": "yes"}}
        changed: Json = {"types": ["healthy"], "podSelector": None, "namespaceSelector": selector}
        api.patch(f"{_OWNERS}/{_DOMAIN}", {"spec": {"inject": changed}})
        polling.wait_until("namespaces", lambda: _gates(server, "team") == both[:1])
        assert _gates(server, labels=labels) == []

        api.patch(f"{_OWNERS}/{_DOMAIN}", {"spec": {"inject": None}})
        polling.wait_until("its end", lambda: _gates(server, "team") == [])
    finally:
        for name in (_DOMAIN, unlisted):
            api.delete(f"{_OWNERS}/{name}")
    # Without any ConditionOwner pods are created as before.
    polling.wait_until("no owner", lambda: _gates(server, labels=labels) == [])
