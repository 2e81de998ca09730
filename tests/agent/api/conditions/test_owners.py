"""ConditionOwners of the API server and of files, as they come, change and go."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog.testing
import yaml
from aiohttp import web

from agent.api.conditions.owners import ApiOwners, FileOwners, OwnerSource
from agent.kube.client import ApiClient
from agent.logs import Event
from tests import polling
from tests.agent.api.conditions.node import OWNERS, owner
from tests.agent.kube import apiserver
from tests.agent.kube.apiserver import ApiServer

GPU, DISK = "gpu.example.com", "disk.example.com"


class Changes:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


@contextlib.asynccontextmanager
async def following(source: OwnerSource) -> AsyncIterator[None]:
    running = asyncio.create_task(source.run())
    try:
        yield
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def domains(source: OwnerSource) -> list[str] | None:
    return None if source.owners is None else list(source.owners)


def user_of(source: OwnerSource, domain: str) -> int | None:
    """Whose processes the owner of a domain names."""
    assert source.owners is not None
    return source.owners[domain].spec.reporters[0].user


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "conditionowners.json"


def of_api(api: ApiClient, state: pathlib.Path, changes: Changes | None = None) -> ApiOwners:
    changed = changes or Changes()
    return ApiOwners(api, state=state, on_change=changed.add, jitter=lambda: 0.0)


async def unavailable(request: web.Request) -> web.StreamResponse | None:
    return apiserver.error_response(503, "ServiceUnavailable")


async def test_owners_of_the_api_server_are_followed(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.put(owner(GPU, {"user": 1}), path=OWNERS)
    changes = Changes()
    source = of_api(api, state, changes)
    assert source.owners is None
    assert source.problems == []
    async with following(source):
        await polling.until("the first list", lambda: domains(source) == [GPU])
        assert changes.count == 1
        server.put(owner(DISK, {"user": 2}), path=OWNERS)
        await polling.until("the second", lambda: domains(source) == [DISK, GPU])
        assert changes.count == 2
        server.delete(GPU, namespace="", path=OWNERS)
        await polling.until("the removal", lambda: domains(source) == [DISK])
        assert changes.count == 3
        assert source.problems == []


async def test_owners_that_were_saved_count_while_the_api_server_is_away(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.put(owner(GPU, {"user": 1}), path=OWNERS)
    first = of_api(api, state)
    async with following(first):
        await polling.until("the file", state.exists)
    server.faults.append(unavailable)
    changes = Changes()
    second = of_api(api, state, changes)
    async with following(second):
        await polling.until("the problem", lambda: second.problems)
        assert second.owners == first.owners
        assert user_of(second, GPU) == 1
        assert changes.count == 1
        (problem,) = second.problems
        assert problem.startswith("ConditionOwners cannot be watched (")
        assert problem.endswith("; using the last ones.")
        server.faults.clear()
        server.put(owner(DISK, {"user": 2}), path=OWNERS)
        await polling.until("the API server's", lambda: domains(second) == [DISK, GPU])
        assert second.problems == []


async def test_without_a_saved_list_there_is_none_while_the_api_server_is_away(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.faults.append(unavailable)
    source = of_api(api, state)
    async with following(source):
        await polling.until("the problem", lambda: source.problems)
        assert source.owners is None
        assert not await asyncio.to_thread(state.exists)


async def test_api_server_without_the_resource_has_no_owners(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    async def absent(request: web.Request) -> web.StreamResponse | None:
        return apiserver.error_response(404, "NotFound")

    server.faults.append(absent)
    source = of_api(api, state)
    async with following(source):
        await polling.until("the empty list", lambda: domains(source) == [])
        assert source.problems == [
            "The API server has no resource conditionowners; install its definition."
        ]


async def test_invalid_owner_of_the_api_server_is_named_and_others_stay(
    server: ApiServer, api: ApiClient, state: pathlib.Path
) -> None:
    server.put(owner(GPU, {"user": 1}), path=OWNERS)
    server.put({**owner(DISK), "spec": "no object"}, path=OWNERS)
    source = of_api(api, state)
    async with following(source):
        await polling.until("the problem", lambda: source.problems)
        assert domains(source) == [GPU]
        assert source.problems == [
            f"ConditionOwner '{DISK}' of the API server: Expected `object`, got `str` - at "
            "`$.spec`."
        ]
        with structlog.testing.capture_logs() as logs:
            server.put(owner(GPU, {"user": -1}), path=OWNERS)
            await polling.until("the second problem", lambda: len(source.problems) == 2)
        # The first is in the log already.
        assert [one["error"] for one in logs if one["event"] == Event.CONDITION_OWNER_INVALID] == [
            source.problems[1]
        ]
        assert source.problems[1].startswith(f"ConditionOwner '{GPU}' of the API server: ")
        assert source.problems[1].endswith("; its last valid version stays.")
        assert domains(source) == [GPU]


def write(path: pathlib.Path, *documents: Any) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    unfinished.rename(path)


async def test_owners_of_a_directory_are_those_of_all_its_files(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "b.yaml", owner(DISK, {"user": 2}))
    write(tmp_path / "a.yaml", owner(GPU, {"user": 1}))
    changes = Changes()
    source = FileOwners(tmp_path, on_change=changes.add)
    assert source.owners is None
    async with following(source):
        await polling.until("both", lambda: domains(source) == [GPU, DISK])
        assert changes.count == 1
        write(tmp_path / "c.yaml", owner(GPU, {"user": 3}))
        await polling.until("the third file", lambda: source.problems)
        assert source.problems == [
            f"ConditionOwner '{GPU}' of c.yaml: there is one of this name already; remove one of "
            "the two; its last valid version stays."
        ]
        assert user_of(source, GPU) == 1
        write(tmp_path / "a.yaml", owner(GPU, {"user": 4}))
        await polling.until("its next version", lambda: user_of(source, GPU) == 4)
        assert len(source.problems) == 1
        (tmp_path / "c.yaml").unlink()
        await polling.until("its end", lambda: not source.problems)
        (tmp_path / "a.yaml").unlink()
        await polling.until("one", lambda: domains(source) == [DISK])
        (tmp_path / "b.yaml").unlink()
        await polling.until("none", lambda: domains(source) == [])


async def test_owners_of_one_file_are_no_others_of_its_directory(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "owners.yaml", owner(GPU, {"user": 1}))
    write(tmp_path / "other.yaml", owner(DISK, {"user": 2}))
    changes = Changes()
    source = FileOwners(tmp_path / "owners.yaml", on_change=changes.add)
    async with following(source):
        await polling.until("the owner", lambda: domains(source) == [GPU])
        (tmp_path / "owners.yaml").write_text("{", encoding="utf-8")
        await polling.until("the problem", lambda: source.problems)
        (problem,) = source.problems
        assert problem.startswith("ConditionOwners cannot be read: owners.yaml is not YAML")
        assert domains(source) == [GPU]
        write(tmp_path / "owners.yaml", owner(GPU, {"user": 1}))
        await polling.until("the file", lambda: not source.problems)
        assert domains(source) == [GPU]
        # Its content is the same as before.
        assert changes.count == 1


async def test_node_has_a_limited_number_of_owners(tmp_path: pathlib.Path) -> None:
    made = [owner(f"gpu{number}.example.com", {"user": 1}) for number in range(65)]
    write(tmp_path / "owners.yaml", *made)
    source = FileOwners(tmp_path / "owners.yaml", on_change=lambda: None)
    async with following(source):
        await polling.until("the owners", lambda: source.problems)
    assert domains(source) == [f"gpu{number}.example.com" for number in range(64)]
    assert source.problems == [
        "ConditionOwner 'gpu64.example.com' of owners.yaml: a node has at most 64 of them; remove "
        "some."
    ]


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ([], "None"),
        ({"metadata": []}, "None"),
        ({"metadata": {"name": 7}}, "7"),
        ({"metadata": {"name": "a" * 300}}, "a" * 253),
    ],
)
async def test_invalid_document_is_named_as_far_as_it_has_a_name(
    tmp_path: pathlib.Path, document: Any, name: str
) -> None:
    write(tmp_path / "owners.yaml", document)
    source = FileOwners(tmp_path / "owners.yaml", on_change=lambda: None)
    async with following(source):
        await polling.until("the problem", lambda: source.problems)
    (problem,) = source.problems
    assert problem.startswith(f"ConditionOwner '{name}' of owners.yaml: ")
    assert domains(source) == []
