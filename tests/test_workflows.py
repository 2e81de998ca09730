"""All workflows: what they use is pinned, and their rights are the least."""

import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

_ROOT = pathlib.Path(__file__).parents[1]
_PATHS = sorted((_ROOT / ".github" / "workflows").iterdir())
# A tag can be moved to another commit, a commit cannot; the comment is for people who update it.
_PIN = re.compile(r"([\w-]+/[\w-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)")


def _read(path: pathlib.Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    found: dict[str, Any] = {
        "on" if key is True else key: value
        for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items()
    }
    return found


def _uses(path: pathlib.Path) -> list[str]:
    return re.findall(r"^[ -]*uses: *(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(params=_PATHS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> pathlib.Path:
    found: pathlib.Path = request.param
    return found


def test_every_action_is_pinned_to_a_commit(path: pathlib.Path) -> None:
    steps = [step for job in _read(path)["jobs"].values() for step in job["steps"]]
    uses = _uses(path)
    assert len(uses) == sum("uses" in step for step in steps) > 0
    assert [one for one in uses if not _PIN.fullmatch(one)] == []


def test_workflows_use_the_same_version_of_an_action() -> None:
    pins = {match.groups() for path in _PATHS for one in _uses(path) if (match := _PIN.match(one))}
    assert sorted(name for name, _, _ in pins) == sorted({name for name, _, _ in pins})


def test_every_job_has_a_limit_and_named_rights(path: pathlib.Path) -> None:
    workflow = _read(path)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert "contents" in job["permissions"]


def test_no_checkout_leaves_the_token_to_later_steps(path: pathlib.Path) -> None:
    steps = [step for job in _read(path)["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert [step for step in checkouts if step["with"]["persist-credentials"] is not False] == []


def test_each_night_recorded_benches_are_compared_and_examples_are_new() -> None:
    workflow = _read(_ROOT / ".github" / "workflows" / "nightly.yaml")
    assert workflow["on"].keys() == {"schedule", "workflow_dispatch"}
    (job,) = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "read"}
    text = "\n".join(step.get("run", "") for step in job["steps"])
    assert re.findall(r"\bmake [a-z]+[\w-]*", text) == ["make setup"]
    assert 'exec make "$TARGET"' in text
    assert job["strategy"]["matrix"]["target"] == ["bench-recorded", "fuzz"]
    assert workflow["defaults"]["run"]["shell"] == "bash"  # with pipefail, for `| tee`
    dry = ["make", "--dry-run", "--directory", str(_ROOT), "bench-recorded"]
    commands = subprocess.run(dry, check=True, capture_output=True, text=True).stdout
    compared = re.findall(r"tests\.bench .*--compare +(.*)", commands)
    recorded = sorted(path.stem for path in (_ROOT / "tests/bench/recorded").glob("*.json"))
    assert [sorted(names.split()) for names in compared] == [recorded]
    assert recorded


def test_pull_requests_run_the_script_of_newcomers_and_get_no_rights() -> None:
    workflow = _read(_ROOT / ".github" / "workflows" / "test.yaml")
    # pull_request_target would run a stranger's code with the repository's secrets.
    assert workflow["on"] == {"pull_request": None, "push": {"branches": ["main"]}}
    assert [job["permissions"] for job in workflow["jobs"].values()] == [{"contents": "read"}]
    assert workflow["concurrency"]["group"]
    text = "\n".join(
        step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]
    )
    assert re.findall(r"\.ci/run|\bmake \w|pytest|ruff|mypy|secrets\.", text) == [".ci/run"]
