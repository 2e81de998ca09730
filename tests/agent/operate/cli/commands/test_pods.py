"""`podgate pods`: one pod by its uid, chosen ones, and each change."""

import json
import pathlib
import socket
from typing import Any

import click.testing
import pytest

from agent.client import podinfo as clients
from agent.operate.cli import main
from tests.agent.operate.cli.stub_agent import GrpcStub


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Any:
    with GrpcStub(tmp_path):
        yield tmp_path


def podgate(directory: pathlib.Path, *arguments: str) -> click.testing.Result:
    command = ["pods", "--run-directory", str(directory), *arguments]
    return click.testing.CliRunner().invoke(main.main, command)


def test_pods_are_chosen_by_namespace_and_name(served: pathlib.Path) -> None:
    whole = json.loads(podgate(served, "-o", "json").stdout)["pods"]
    assert len(whole) > 1
    name = whole[0]["podName"]
    chosen = json.loads(podgate(served, "--pod", name, "-o", "json").stdout)["pods"]
    assert chosen == [pod for pod in whole if pod["podName"] == name]


def test_watch_and_uid_exclude_each_other(tmp_path: pathlib.Path) -> None:
    result = podgate(tmp_path, "--watch", "--uid", "u")
    assert result.exit_code == 2
    assert "--watch shows all pods; leave out --uid" in result.output


def test_agent_that_does_not_run_is_named(tmp_path: pathlib.Path) -> None:
    result = podgate(tmp_path)
    assert result.exit_code == 3
    assert "does not exist; is 'podgate run' running?" in result.output


def test_pod_is_found_by_its_uid(served: pathlib.Path) -> None:
    (pod, *_) = json.loads(podgate(served, "-o", "json").stdout)["pods"]
    found = podgate(served, "--uid", pod["podUid"], "-o", "json")
    assert json.loads(found.stdout)["pods"] == [pod]
    unknown = podgate(served, "--uid", "unknown")
    assert unknown.exit_code == 1
    assert "no such pod" in unknown.output


def test_socket_that_nothing_serves_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "podinfo" / "podinfo.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as unserved:
        unserved.bind(str(path))
    result = podgate(tmp_path)
    assert result.exit_code == 3
    assert f"no agent responds at {path}" in result.output


def test_watch_shows_each_state(served: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = podgate(served, "-o", "json").stdout
    state = clients.PodInfoClient(f"unix://{served}/podinfo/podinfo.sock").list(20)
    monkeypatch.setattr(clients.PodInfoClient, "__iter__", lambda _: iter([state, state]))
    assert podgate(served, "--watch", "-o", "json").stdout == 2 * listed
