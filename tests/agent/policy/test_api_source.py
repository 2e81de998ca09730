"""Policies of the API server, beside those of files, in whatever state either is."""

import asyncio
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing
from aiohttp import web

from agent.kube.client import ApiClient
from agent.logs import Event
from agent.policy import api_types
from agent.policy.api_source import QUERY, ApiPolicies
from agent.policy.api_types import Policy
from agent.policy.effective import EffectivePolicies, PolicyProvider
from agent.policy.files import PolicyFiles
from tests.agent.kube.apiserver import ApiServer
from tests.agent.kube.conftest import api, kubeconfig, listening, opened, server
from tests.agent.policy.test_files import Files, policy, wrong
from tests.blocking import may_block

__all__ = ["api", "kubeconfig", "listening", "server"]

pytestmark = pytest.mark.looptime

IN_A_THREAD = "the agent calls it in a thread, for which fake time would not wait"


class Followed:
    """The API's policies, watched and refreshed as by the agent."""

    @may_block(IN_A_THREAD)
    def __init__(
        self, api: ApiClient, state: pathlib.Path, files: PolicyFiles | None = None
    ) -> None:
        self.source = ApiPolicies(api, state=state, jitter=lambda: 0.5)
        sources: list[PolicyProvider[Policy]] = [files] if files else []
        self.in_force = EffectivePolicies([*sources, self.source])
        self.in_force.restore()

    @property
    def ports(self) -> dict[str, int]:
        """The policies in force, with the one port that each has."""
        self._look()
        return {one.name: one.rules[0].first_port for one in self.in_force.policies}

    @property
    def problems(self) -> list[str]:
        self._look()
        return self.in_force.problems

    @may_block(IN_A_THREAD)
    def has_changed(self) -> bool:
        return self.in_force.refresh()

    @may_block(IN_A_THREAD)
    def _look(self) -> None:
        self.in_force.refresh()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Followed"]:
        task = asyncio.create_task(self.source.watcher.run())
        try:
            await asyncio.sleep(1)
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def put(server: ApiServer, thing: dict[str, Any], *, uid: str = "") -> None:
    name = thing["metadata"]["name"]
    made = {**thing, "metadata": {**thing["metadata"], "uid": uid or f"uid-{name}"}}
    server.put(made, path=QUERY.path)


def delete(server: ApiServer, name: str) -> None:
    server.delete(name, namespace="", path=QUERY.path)


def spoil(state: pathlib.Path, content: bytes) -> None:
    state.parent.mkdir()
    state.write_bytes(content)


def stamp(state: pathlib.Path) -> tuple[int, int]:
    return state.stat().st_ino, state.stat().st_mtime_ns


async def not_installed(request: web.Request) -> web.StreamResponse | None:
    """As kube-apiserver responds for a group that it does not have."""
    if request.path != QUERY.path:
        return None
    return web.Response(status=404, text="404 page not found\n")


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "apipolicies.json"


async def test_policies_come_change_and_go(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        assert followed.ports == {"a": 80}
        put(server, policy("a", 81))
        put(server, policy("b"))
        await asyncio.sleep(1)
        assert followed.ports == {"a": 81, "b": 80}
        delete(server, "a")
        await asyncio.sleep(1)
        assert followed.ports == {"b": 80}
        assert followed.problems == []


async def test_changes_are_yielded_at_once(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async with Followed(api, state).running() as followed:
        changes = followed.source.changes(at_least_every_seconds=100)
        asyncio.get_running_loop().call_later(7, put, server, policy("a"))
        before = asyncio.get_running_loop().time()
        await anext(changes)
        assert asyncio.get_running_loop().time() - before < 8
        assert followed.ports == {"a": 80}
        await anext(changes)
        assert asyncio.get_running_loop().time() - before >= 100


async def test_invalid_policy_is_one_sentence_and_affects_no_other(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, policy("a"))
    put(server, wrong("b"))
    put(server, {"metadata": {"name": "c"}})
    put(server, {**policy("d"), "spec": "text"})
    async with Followed(api, state).running() as followed:
        assert followed.ports == {"a": 80}
        assert followed.problems == [
            "API server, policy 'b': spec: object missing required field `from`.",
            "API server, policy 'c': spec: expected `object`, got `null`.",
            "API server, policy 'd': spec: expected `object`, got `str`.",
        ]


async def test_invalid_policy_keeps_its_last_version_until_fixed_or_deleted(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        assert followed.ports == {"a": 80}
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                put(server, wrong("a"))
                await asyncio.sleep(1)
                assert followed.ports == {"a": 80}
        assert [line["event"] for line in lines] == [Event.POLICY_PROBLEM]
        (problem,) = followed.problems
        assert problem.endswith("The last valid version stays in force.")
        put(server, policy("a", 82))
        await asyncio.sleep(1)
        assert followed.ports == {"a": 82}
        assert followed.problems == []
        put(server, wrong("a"))
        delete(server, "a")
        await asyncio.sleep(1)
        assert followed.ports == {}
        assert followed.problems == []


async def test_a_wrong_policy_that_takes_another_s_name_gets_nothing_of_it(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        assert followed.ports == {"a": 80}
        delete(server, "a")
        put(server, wrong("a"), uid="another")
        await asyncio.sleep(1)
        assert followed.ports == {}


async def test_policy_replaced_at_once_stays_in_force(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.can_stream_lists = False
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        await asyncio.sleep(5)
        assert followed.ports == {"a": 80}
        stream = await server.watched(QUERY.path, count=2)

        def meanwhile() -> None:
            delete(server, "a")
            put(server, policy("a", 81), uid="another")

        server.silently(meanwhile)
        server.oldest_version = server.version
        stream.end()
        seen = []
        for _ in range(100):
            await asyncio.sleep(0.1)
            seen.append(followed.ports["a"])
        assert sorted(seen) == seen
        assert set(seen) == {80, 81}


async def test_missing_resource_is_no_problem_and_retried_slowly(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.faults.append(not_installed)
    with structlog.testing.capture_logs() as lines:
        async with Followed(api, state).running() as followed:
            assert followed.source.watcher.answered.is_set()
            await asyncio.sleep(600)
            assert followed.ports == {}
            assert followed.problems == []
            assert "without resource hostaccesspolicies" in followed.source.name
    assert 8 <= len(server.of(QUERY.path)) <= 12
    logged = [line for line in lines if line.get("resource") == "hostaccesspolicies"]
    assert [(line["log_level"], line["event"]) for line in logged] == [
        ("info", Event.RESOURCE_NOT_SERVED)
    ]


async def test_resource_installed_later_is_found(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.faults.append(not_installed)
    async with Followed(api, state).running() as followed:
        await asyncio.sleep(300)
        server.faults.clear()
        put(server, policy("a"))
        await asyncio.sleep(90)
        assert followed.ports == {"a": 80}
        assert followed.source.name == "the API server"
        assert server.of(QUERY.path)[-1].is_streamed_list
        put(server, policy("b"))
        await asyncio.sleep(1)
        assert followed.ports == {"a": 80, "b": 80}


async def test_policies_go_with_their_resource_but_not_by_one_server_s_word(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    """Servers that have just started respond with 404 for custom resources, until 1.23."""
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        server.faults.append(not_installed)
        server.stream(QUERY.path).end()
        await asyncio.sleep(20)
        assert followed.ports == {"a": 80}
        server.faults.clear()
        await asyncio.sleep(90)
        assert followed.ports == {"a": 80}
        server.faults.append(not_installed)
        server.stream(QUERY.path).end()
        await asyncio.sleep(200)
        assert followed.ports == {}


async def test_missing_permission_is_one_sentence_and_retried_slowly(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.forbid(QUERY.path)
    with structlog.testing.capture_logs() as lines:
        async with Followed(api, state).running() as followed:
            assert followed.source.watcher.answered.is_set()
            await asyncio.sleep(600)
            assert followed.problems == ["API server: Forbidden; using its last known policies."]
            assert len(server.of(QUERY.path)) <= 12
            server.faults.clear()
            put(server, policy("a"))
            await asyncio.sleep(90)
            assert followed.ports == {"a": 80}
            assert followed.problems == []
    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert [(line["resource"], line["error"]) for line in warnings] == [
        ("hostaccesspolicies", "Forbidden")
    ]


async def test_a_right_that_is_taken_away_takes_no_policy_along(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        server.forbid(QUERY.path)
        server.stream(QUERY.path).end()
        await asyncio.sleep(600)
        assert followed.ports == {"a": 80}


async def test_saved_policies_are_in_force_without_the_api_server(
    listening: pathlib.Path, kubeconfig: str, state: pathlib.Path
) -> None:
    server = ApiServer()
    for name in ("a", "b", "c"):
        put(server, policy(name))
    async with (
        server.running(listening),
        opened(kubeconfig) as api,
        Followed(api, state).running() as followed,
    ):
        assert followed.ports == {"a": 80, "b": 80, "c": 80}
        put(server, policy("a", 81))
        put(server, wrong("b"))
        delete(server, "c")
        await asyncio.sleep(1)
        before = followed.ports
        problems = followed.problems
    async with opened(kubeconfig) as api:
        restarted = Followed(api, state)
        assert restarted.ports == before == {"a": 81, "b": 80}
        assert restarted.problems == problems
        async with restarted.running():
            await restarted.source.first_list()
            await asyncio.sleep(3600)
            assert restarted.ports == before
            assert restarted.problems[:-1] == problems
            assert restarted.problems[-1].endswith("using its last known policies.")


async def test_what_changed_meanwhile_is_taken_up_when_the_server_is_back(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    for name in ("a", "b", "c"):
        put(server, policy(name))
    async with Followed(api, state).running() as followed:
        assert followed.ports == {"a": 80, "b": 80, "c": 80}
    put(server, wrong("a"))
    put(server, policy("b", 81))
    delete(server, "c")
    put(server, policy("d"))
    restarted = Followed(api, state)
    assert restarted.ports == {"a": 80, "b": 80, "c": 80}
    async with restarted.running():
        assert restarted.ports == {"a": 80, "b": 81, "d": 80}


async def test_invalid_policy_inherits_nothing_of_a_deleted_one(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        assert followed.ports == {"a": 80}
    delete(server, "a")
    put(server, wrong("a"), uid="another")
    restarted = Followed(api, state)
    assert restarted.ports == {"a": 80}
    async with restarted.running():
        assert restarted.ports == {}


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1}', b"\xff"])
async def test_saved_policies_that_are_spoilt_are_left(
    server: ApiServer, api: ApiClient, state: pathlib.Path, content: bytes
) -> None:
    spoil(state, content)
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        assert followed.ports == {"a": 80}


async def test_nothing_is_written_at_rest(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    put(server, policy("a"))
    async with Followed(api, state).running() as followed:
        assert followed.ports
        before = stamp(state)
        for _ in range(10):
            await asyncio.sleep(60)
            server.bookmark(QUERY.path)
            assert followed.ports
        assert stamp(state) == before


async def test_gates_wait_briefly_for_the_first_list(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async def hang(request: web.Request) -> web.StreamResponse | None:
        await asyncio.sleep(100_000)
        return None

    now = asyncio.get_running_loop().time
    followed = Followed(api, state)
    put(server, policy("a"))
    async with followed.running():
        before = now()
        await followed.source.first_list()
        assert followed.ports == {"a": 80}
        assert now() - before < 1
    server.faults.append(hang)
    silent = Followed(api, state.with_name("other.json"))
    async with silent.running():
        before = now()
        await silent.source.first_list()
        assert now() - before < 2.1
    knowing = Followed(api, state)
    async with knowing.running():
        before = now()
        await knowing.source.first_list()
        assert now() == before


async def test_unreachable_server_delays_nothing(
    listening: pathlib.Path, kubeconfig: str, state: pathlib.Path
) -> None:
    async with opened(kubeconfig) as api, Followed(api, state).running() as followed:
        assert followed.source.watcher.answered.is_set()


async def test_of_one_name_the_files_policy_is_in_force(
    server: ApiServer, api: ApiClient, state: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    files = Files(tmp_path)
    files.write("a.yaml", policy("both", 1), policy("file", 2))
    put(server, policy("both", 3))
    put(server, policy("api", 4))
    async with Followed(api, state, files.source).running() as followed:
        assert followed.ports == {"both": 1, "file": 2, "api": 4}
        assert followed.problems == [
            "API server has policy both, which a.yaml, document 1 already has; "
            "remove one of the two."
        ]
        files.remove("a.yaml")
        assert followed.ports == {"both": 3, "api": 4}
        assert followed.problems == []
        files.write("b.yaml", policy("api", 5))
        assert followed.ports == {"both": 3, "api": 5}
        assert len(followed.problems) == 1


async def test_policies_of_all_sources_are_limited_to_the_counters(
    server: ApiServer, api: ApiClient, state: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    files = Files(tmp_path)
    files.write("a.yaml", policy("file"))
    for number in range(api_types.MAX_POLICIES):
        put(server, policy(f"p{number}"))
    async with Followed(api, state, files.source).running() as followed:
        assert len(followed.ports) == api_types.MAX_POLICIES
        assert "file" in followed.ports
        (problem,) = followed.problems
        assert "together with API server has 1 policies more than the maximum of 2,048" in problem


async def test_status_of_a_policy_is_no_change_for_nodes(
    server: ApiServer, api: ApiClient, tmp_path: pathlib.Path
) -> None:
    """Of each policy, at each report of a node: 5,000 nodes would compute all rules each time."""
    state = tmp_path / "state" / "apipolicies.json"
    made = policy("backup", 80)
    made["metadata"]["generation"] = 1
    async with Followed(api, state).running() as followed:
        put(server, made)
        await asyncio.sleep(1)
        assert followed.ports == {"backup": 80}
        before = stamp(state)
        put(server, made | {"status": {"observedGeneration": 1}})
        await asyncio.sleep(1)
        assert not followed.has_changed()
        assert stamp(state) == before
        changed = policy("backup", 81)
        changed["metadata"]["generation"] = 2
        put(server, changed)
        await asyncio.sleep(1)
        assert followed.ports == {"backup": 81}
        assert [one.generation for one in followed.source.newest()] == [2]


async def test_invalid_policy_is_reported_by_its_name(
    server: ApiServer, api: ApiClient, tmp_path: pathlib.Path
) -> None:
    async with Followed(api, tmp_path / "state" / "apipolicies.json").running() as followed:
        put(server, policy("good", 80))
        put(server, wrong("bad"))
        await asyncio.sleep(1)
        assert followed.ports == {"good": 80}
        assert set(followed.source.invalid()) == {"bad"}
        assert {one.name for one in followed.source.newest()} == {"good", "bad"}


async def test_first_list_that_takes_a_second_is_waited_for(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async def answer_slowly(request: web.Request) -> web.StreamResponse | None:
        await asyncio.sleep(1)
        return None

    put(server, policy("a"))
    server.faults.append(answer_slowly)
    followed = Followed(api, state)
    task = asyncio.create_task(followed.source.watcher.run())
    await followed.source.first_list()
    assert followed.ports == {"a": 80}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
