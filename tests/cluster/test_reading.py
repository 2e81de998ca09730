"""Who reads what of podgate, by a real API server, a real kubectl and its proxy to an agent's pod.

| user | has | drops of all | drops -n shop | why-not-ready shop/web |
|---|---|---|---|---|
| auditor | podgate-audit, podgate-view | all | all | with the agent's checks |
| operator | the same, podgate-operate | all | all | with the agent's checks |
| editor | edit in shop, podgate-reach | forbidden | shop's | with the agent's checks |
| developer | view in shop | forbidden | forbidden | what the API has |
| stranger | nothing | forbidden | forbidden | forbidden |
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.cluster import users
from tests.cluster.api_only import ApiOnly
from tests.cluster.users import PODS, PORT, Plugin

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    with users.running(tmp_path_factory.mktemp("api")) as made:
        yield made


@pytest.fixture
async def agent(server: ApiOnly) -> AsyncIterator[None]:
    async with users.agent(server):
        yield


@pytest.fixture
def plugin(
    server: ApiOnly,
    agent: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Plugin:
    return users.plugin(server, capsys, monkeypatch)


async def test_each_user_reads_what_it_may(server: ApiOnly, plugin: Plugin) -> None:
    for user in ("auditor", "operator"):
        for place in ((), ("-n", "shop"), ("-n", "bank")):
            status, output, errors = await plugin(user, "drops", "-o", "json", *place)
            assert status == 0, (user, place, errors)
            wanted = {"shop": ["shop"], "bank": ["bank"]}.get((*place, "", "")[1], ["bank", "shop"])
            assert sorted(one["namespace"] for one in json.loads(output)["sources"]) == wanted
        status, output, errors = await plugin(user, "status", "-o", "json")
        assert (status, len(json.loads(output)["nodes"])) == (0, 1), errors

    status, output, errors = await plugin("editor", "drops", "-n", "shop", "-o", "json")
    assert status == 0, errors
    assert [one["namespace"] for one in json.loads(output)["sources"]] == ["shop"]
    # No user gets an empty answer where something was left out.
    for user, namespace in (("editor", "bank"), ("developer", "shop"), ("stranger", "shop")):
        status, output, errors = await plugin(user, "drops", "-n", namespace)
        assert (status != 0, "No host process" in output) == (True, False), (user, output)
        assert "orbidden" in errors, (user, errors)

    for user, knows_gate in (("auditor", False), ("editor", True), ("developer", False)):
        status, output, errors = await plugin(user, "why-not-ready", "shop/web", "-o", "json")
        if user == "auditor":  # podgate's rights are not those to read pods
            assert "orbidden" in errors
            continue
        assert status == 0, (user, errors)
        found = json.loads(output)
        assert ("the gate is in force" in output) is knows_gate, user
        assert bool(found["notRead"]) is not knows_gate
    status, output, errors = await plugin("stranger", "why-not-ready", "shop/web")
    assert (status, output) == (1, "")


async def test_reader_reaches_answers_alone(server: ApiOnly, agent: None) -> None:
    """Not the node's other ports, nor metrics; and the token opens nothing else."""
    reach = users.token(server)
    for target in (
        *("https:podgate-node1:10250/proxy/pods", "podgate-node1:2379/proxy/version"),
        *(f"https:podgate-node1:{PORT}/proxy/metrics", f"https:podgate-node1:{PORT}/proxy/"),
    ):
        answer = await asyncio.to_thread(server.send, "GET", f"{PODS}/{target}", {}, token=reach)
        assert answer.code == 403, (target, answer)
    spec = {"audiences": ["podgate.io/agent"], "expirationSeconds": 600}
    account = "/api/v1/namespaces/podgate/serviceaccounts/podgate-view/token"
    made = server.api.create(account, {"spec": spec})
    answers = made["status"]["token"]
    answer = await asyncio.to_thread(server.send, "GET", PODS, {}, token=answers)
    assert answer.code == 401
