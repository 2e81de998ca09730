"""`podgate cleanup`: what it prints, and the end of a DaemonSet's cleanup."""

import pathlib
import signal
from collections.abc import Collection

import click.testing
import pytest

from agent.app import preflight, removal
from agent.cni.installer import CniInstaller
from agent.operate.cli import main
from bpf import cleanup


class Node:
    """A node without kernel objects; `plugins` has the podgate-cni that is removed by each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path) -> None:
        self.plugins: list[tuple[CniInstaller | None, bool]] = []
        self.was_ready: list[bool] = []
        """Whether the file `ready` existed at the removal, and at the wait for the pod's end."""
        self.services_state: pathlib.Path | None = None
        self.pod_directory = directory / "pod"
        self.pod_directory.mkdir()
        self.run_directory = directory / "run"
        monkeypatch.setattr(preflight, "check_rights", lambda: None)
        monkeypatch.setattr(removal, "remove", self._remove)
        monkeypatch.setattr(signal, "sigwait", self._wait)
        monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)

    def _remove(
        self,
        *_: object,
        plugin: CniInstaller | None,
        is_binary_kept: bool,
        services_state: pathlib.Path | None,
    ) -> cleanup.Removed:
        self.plugins.append((plugin, is_binary_kept))
        self.services_state = services_state
        self._note()
        return cleanup.Removed(3, 2)

    def _wait(self, signals: Collection[int]) -> None:
        assert set(signals) == {signal.SIGTERM, signal.SIGINT}
        self._note()

    def _note(self) -> None:
        self.was_ready.append((self.pod_directory / "ready").exists())

    def clean(self, *arguments: str) -> str:
        command = ["cleanup", "--run-directory", str(self.run_directory), *arguments]
        result = click.testing.CliRunner().invoke(main.main, command)
        assert result.exit_code == 0, result.output
        return result.output


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Node:
    return Node(monkeypatch, tmp_path)


def test_what_was_removed_is_counted(node: Node) -> None:
    assert node.clean() == (
        "Removed 3 pins, 2 filters, and all tables, routes and relay interfaces of podgate.\n"
    )
    assert node.plugins == [(None, False)]
    assert node.was_ready == [False]


def test_saved_state_that_stays_is_named(node: Node) -> None:
    node.run_directory.mkdir()
    assert f"Saved state is still in {node.run_directory}; --uninstall" in node.clean()
    assert "Saved state" not in node.clean("--uninstall")


def test_uninstall_removes_the_plugin_of_these_directories(
    node: Node, tmp_path: pathlib.Path
) -> None:
    node.clean("--uninstall", "--cni-bin-dir", str(tmp_path), "--keep-cni-binary")
    ((plugin, is_binary_kept),) = node.plugins
    assert plugin is not None
    assert is_binary_kept


def test_saved_services_are_removed_with_uninstall_only(
    node: Node, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "services.json"
    monkeypatch.setenv("PODGATE_SERVICES_STATE", str(path))
    node.clean()
    assert node.services_state is None
    node.clean("--uninstall")
    assert node.services_state == path


def test_pod_of_a_daemonset_is_ready_after_the_removal_and_waits_for_its_end(node: Node) -> None:
    (node.pod_directory / "ready").touch()
    node.clean("--pod-directory", str(node.pod_directory))
    assert node.was_ready == [False, True]


def test_pod_of_a_daemonset_tries_again_and_reports_each_problem_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = ["first", "first", "second"]
    pauses: list[float] = []

    def remove(*arguments: object, **options: object) -> cleanup.Removed:
        if problems:
            raise removal.IncompleteError(problems.pop(0))
        return cleanup.Removed(1, 0)

    def wait(signals: Collection[int], seconds: float) -> None:
        assert set(signals) == {signal.SIGTERM, signal.SIGINT}
        pauses.append(seconds)

    monkeypatch.setattr(removal, "remove", remove)
    monkeypatch.setattr(signal, "sigtimedwait", wait)
    printed = node.clean("--pod-directory", str(node.pod_directory))
    assert [line for line in printed.splitlines() if line.startswith("podgate: ")] == [
        "podgate: first",
        "podgate: second",
    ]
    assert len(pauses) == 3
    assert "Removed 1 pins" in printed


def test_signal_ends_the_cleanup_that_is_to_be_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(*arguments: object, **options: object) -> cleanup.Removed:
        raise removal.IncompleteError("busy")

    monkeypatch.setattr(removal, "remove", remove)
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: signal.SIGTERM)
    printed = node.clean("--pod-directory", str(node.pod_directory))
    assert printed == "podgate: busy\n"
    assert not (node.pod_directory / "ready").exists()
