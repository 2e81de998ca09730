"""Results of probes outlive the agent for the same sandbox, and for no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import time

import pytest

from agent import state_files
from agent.probing.result_store import ResultStore, SavedProbes, reported_results, sandbox_of
from probes.engine.workers import ProbeType
from probes.netns import Netns
from probes.results import ProbeResult
from tests.polling import until
from tests.probes.conftest import sandbox_netns

RESULTS = {"app": {ProbeType.READINESS: ProbeResult.SUCCESS}}


def end(store: ResultStore) -> None:
    """Stop it as an agent does."""

    async def run() -> None:
        running = asyncio.create_task(store.run())
        await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())


def save(path: pathlib.Path) -> ResultStore:
    """A store that had one pod, and was stopped."""
    store = ResultStore(path)
    store.claim("u", "4:1:1").results = RESULTS
    end(store)
    return store


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "state" / "probes.json"
    save(made)
    return made


def test_the_same_sandbox_finds_its_results(path: pathlib.Path) -> None:
    assert ResultStore(path).claim("u", "4:1:1").results == RESULTS


def test_file_has_all_that_another_agent_needs(path: pathlib.Path) -> None:
    store = ResultStore(path)
    claimed = store.claim("u", "4:1:1")
    claimed.annotation, claimed.is_taken, claimed.containers = "{}", True, {"app": "c1"}
    store.save_soon()
    end(store)
    assert ResultStore(path).claim("u", "4:1:1") == SavedProbes(
        uid="u",
        sandbox="4:1:1",
        started_at=claimed.started_at,
        annotation="{}",
        is_taken=True,
        results=RESULTS,
        containers={"app": "c1"},
    )


def test_results_that_no_pod_claims_are_left_out_after_a_while(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    for seconds, results in ((290, RESULTS), (310, {})):
        store = ResultStore(path)
        monkeypatch.setattr(time, "monotonic", lambda now=started + seconds: now)
        store.claim("v", f"4:2:{seconds}")
        end(store)
        monkeypatch.undo()
        assert ResultStore(path).claim("u", "4:1:1").results == results


def test_pod_keeps_its_results_while_its_sandbox_lasts(path: pathlib.Path) -> None:
    store = ResultStore(path)
    claimed = store.claim("u", "4:1:1")
    assert store.claim("u", "4:1:1") is claimed
    assert store.get("u") is claimed
    assert store.claim("u", "4:1:2").results == {}
    assert store.claim("u", "4:1:1").results == {}
    assert store.get("v") is None


async def test_store_without_a_file_keeps_nothing_and_runs() -> None:
    store = ResultStore(None)
    running = asyncio.create_task(store.run())
    store.claim("u", "4:1:1").results = RESULTS
    store.save_soon()
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    store.forget("u")
    assert store.claim("u", "4:1:1").results == {}


@pytest.mark.parametrize(("cookie", "name"), [(77, "4:1001:77"), (None, "4:1001:-")])
def test_sandbox_is_named_by_its_namespace(
    monkeypatch: pytest.MonkeyPatch, cookie: int | None, name: str
) -> None:
    monkeypatch.setattr(Netns, "cookie", lambda netns: cookie)
    assert sandbox_of(Netns("/run/netns/web", 4, 1001)) == name


def test_another_sandbox_of_the_pod_finds_nothing(path: pathlib.Path) -> None:
    assert ResultStore(path).claim("u", "4:1:2").results == {}


def test_another_pod_finds_nothing(path: pathlib.Path) -> None:
    assert ResultStore(path).claim("v", "4:1:1").results == {}


def test_unclaimed_results_are_kept(path: pathlib.Path) -> None:
    store = ResultStore(path)
    store.claim("v", "4:2:2")
    end(store)
    assert ResultStore(path).claim("u", "4:1:1").results == RESULTS


def test_a_pod_that_is_gone_is_forgotten(path: pathlib.Path) -> None:
    store = ResultStore(path)
    store.claim("u", "4:1:1")
    store.forget("u")
    end(store)
    assert ResultStore(path).claim("u", "4:1:1").results == {}


def test_results_of_another_boot_do_not_count(path: pathlib.Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"boot": "another"}))
    assert ResultStore(path).claim("u", "4:1:1").results == {}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"boot": 1, "pods": []}', '{"boot": "b", "pods": [{"uid": "u"}]}', "\x00"],
)
def test_a_file_that_is_none_is_left_out(path: pathlib.Path, content: str) -> None:
    path.write_text(content)
    assert ResultStore(path).claim("u", "4:1:1").results == {}


def test_a_result_that_there_is_not_is_left_out(path: pathlib.Path) -> None:
    path.write_text(path.read_text().replace('"success"', '"perfect"'))
    assert ResultStore(path).claim("u", "4:1:1").results == {}


def test_a_start_in_the_future_is_now(path: pathlib.Path) -> None:
    content = json.loads(path.read_text())
    content["pods"][0]["started_at"] = time.time() + 1e6
    path.write_text(json.dumps(content))
    assert ResultStore(path).claim("u", "4:1:1").started_at <= time.time()


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "state").write_text("a file")
    store = save(tmp_path / "state" / "probes.json")
    assert store.claim("u", "4:1:1").results == RESULTS
    # What could not be written is kept, also for the tests that follow in this process.
    (tmp_path / "state").unlink()
    state_files._unwritten.retry()
    assert state_files.unwritten() == []


async def test_changes_are_written_while_running(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state" / "probes.json"
    store = ResultStore(path)
    running = asyncio.create_task(store.run())
    store.claim("u", "4:1:1")
    await until("the file is written", path.exists)
    assert ResultStore(path).claim("u", "4:1:1").started_at < time.time()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_pod_that_is_gone_is_removed_from_the_file(path: pathlib.Path) -> None:
    store = ResultStore(path)
    store.claim("u", "4:1:2")
    running = asyncio.create_task(store.run())
    await until("the claim is written", lambda: "4:1:2" in path.read_text())
    store.forget("u")
    await until("the file has no pod", lambda: not json.loads(path.read_text())["pods"])
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.kernel
def test_no_two_sandboxes_have_one_name() -> None:
    with sandbox_netns() as first:
        name = sandbox_of(first.netns)
        assert name == sandbox_of(Netns.open(first.path))
    with sandbox_netns() as second:
        assert sandbox_of(second.netns) != name


def test_condition_that_is_newer_than_the_container_replaces_lost_results() -> None:
    passing = {
        ProbeType.STARTUP: ProbeResult.SUCCESS,
        ProbeType.READINESS: ProbeResult.SUCCESS,
    }
    # The API has whole seconds.
    assert reported_results(1000.0, 1000.9) == passing
    assert reported_results(1000.0, 1.5) == passing


@pytest.mark.parametrize(
    ("since", "started_at"),
    [(None, 1.0), (1000.0, 1001.0), (1000.0, 0.0)],
    ids=["no condition", "a later run", "unknown start"],
)
def test_no_other_condition_replaces_lost_results(since: float | None, started_at: float) -> None:
    assert reported_results(since, started_at) == {}
