"""The plugin's state file follows the modes of node and namespaces."""

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

from agent.cni import publisher, state
from agent.cni.publisher import CniStatePublisher
from agent.labels import MAX_MODE_LABEL, MODE_LABEL
from agent.logs import Event
from agent.pods.pod_modes import HELD, NewPodModes, PodModes
from bpf import abi, sources
from bpf.gates import Attachment
from bpf.verdicts import Mode
from tests.polling import until


def content(directory: pathlib.Path) -> Any:
    return json.loads((directory / "cni.json").read_text())


def modes_in(directory: pathlib.Path) -> tuple[str, dict[str, str]]:
    found = content(directory)
    return found["mode"], found["namespaces"]


def opened(directory: pathlib.Path, modes: PodModes) -> CniStatePublisher:
    made = CniStatePublisher(directory, Attachment.TCX, modes)
    made.open()
    return made


@contextlib.asynccontextmanager
async def running(directory: pathlib.Path, modes: PodModes) -> AsyncIterator[None]:
    task = asyncio.create_task(opened(directory, modes).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_file_has_programs_and_modes(tmp_path: pathlib.Path) -> None:
    modes = PodModes(Mode.AUDIT)
    modes.set_namespace("shop", {MODE_LABEL: "enforce"})
    modes.set_namespace("same", {MODE_LABEL: "audit"})
    opened(tmp_path, modes)
    assert content(tmp_path) == {
        "mode": "audit",
        "attachment": "tcx",
        "schema": abi.SCHEMA,
        "programs": sources.fingerprint(),
        "namespaces": {"shop": "enforce"},
    }
    assert (tmp_path / "cni.json").stat().st_mode & 0o777 == 0o600


async def test_file_follows_labels_and_ceiling(tmp_path: pathlib.Path) -> None:
    modes = PodModes(Mode.AUDIT)
    async with running(tmp_path, modes):
        modes.set_namespace("shop", {MODE_LABEL: "strict"})
        await until("a namespace", lambda: modes_in(tmp_path) == ("audit", {"shop": "strict"}))
        modes.set_node({MODE_LABEL: "enforce", MAX_MODE_LABEL: "enforce"})
        await until("the node", lambda: modes_in(tmp_path) == ("enforce", {}))
        modes.set_namespace("shop", {})
        modes.set_node({MAX_MODE_LABEL: "off"})
        await until("the ceiling", lambda: modes_in(tmp_path) == ("off", {}))


async def test_changes_that_come_together_are_written_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[NewPodModes] = []
    publish = state.publish

    def note(directory: pathlib.Path, desired: NewPodModes, attachment: Attachment) -> None:
        written.append(desired)
        publish(directory, desired, attachment)

    monkeypatch.setattr(state, "publish", note)
    modes = PodModes(Mode.AUDIT)
    names = ["lab", "shop", "web"]
    async with running(tmp_path, modes):
        for name in names:
            modes.set_namespace(name, {MODE_LABEL: "enforce"})
            await asyncio.sleep(0)
        await until("all", lambda: sorted(modes_in(tmp_path)[1]) == names)
    assert [sorted(one.namespaces) for one in written] == [[], names]


async def test_file_that_cannot_be_written_at_the_start_is_written_later(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_RETRY_SECONDS", 0.01)
    directory = tmp_path / "file" / "run"
    directory.parent.touch()
    with structlog.testing.capture_logs() as logs:
        async with running(directory, PodModes(Mode.AUDIT)):
            await asyncio.sleep(0.5)
            directory.parent.unlink()
            await until("the file", lambda: (directory / "cni.json").exists())
    # However often it is tried.
    assert [line["event"] for line in logs].count(Event.CNI_STATE_NOT_WRITTEN) == 1


async def test_modes_of_the_previous_agent_stay_until_labels_are_listed(
    tmp_path: pathlib.Path,
) -> None:
    previous = NewPodModes(Mode.ENFORCE, {"shop": Mode.STRICT, "lab": Mode.OFF})
    await asyncio.to_thread(state.publish, tmp_path, previous, Attachment.TCX)
    modes = PodModes(Mode.AUDIT, is_complete=False)
    async with running(tmp_path, modes):
        assert modes_in(tmp_path) == ("enforce", {"shop": "strict", "lab": "off"})
        modes.set_namespace("lab", {MODE_LABEL: "enforce"})
        kept = {"shop": "strict", "lab": "enforce"}
        await until("what is known", lambda: modes_in(tmp_path) == ("enforce", kept))
        modes.complete()
        await until("all labels", lambda: modes_in(tmp_path) == ("audit", {"lab": "enforce"}))


def test_ceiling_bounds_the_modes_of_the_previous_agent(tmp_path: pathlib.Path) -> None:
    state.publish(tmp_path, NewPodModes(Mode.STRICT, {"shop": Mode.ENFORCE}), Attachment.TCX)
    opened(tmp_path, PodModes(Mode.AUDIT, Mode.AUDIT, is_complete=False))
    assert modes_in(tmp_path) == ("audit", {"shop": "audit"})


@pytest.mark.parametrize(
    "text", ["", "{", '{"mode": "open", "attachment": "tcx"}', '{"mode": 1}', "[]"]
)
def test_broken_file_of_the_previous_agent_is_replaced(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "cni.json").write_text(text)
    opened(tmp_path, PodModes(Mode.ENFORCE, is_complete=False))
    assert modes_in(tmp_path) == ("enforce", {HELD: "audit"})


def test_file_without_namespaces_is_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cni.json").write_text('{"mode": "strict", "attachment": "tcx", "schema": 1}')
    opened(tmp_path, PodModes(Mode.AUDIT, is_complete=False))
    assert modes_in(tmp_path) == ("strict", {})


def test_without_podgate_new_pods_are_open(tmp_path: pathlib.Path) -> None:
    state.publish(tmp_path, NewPodModes(Mode.STRICT, {"shop": Mode.ENFORCE}), Attachment.TCX)
    state.retire(tmp_path)
    assert modes_in(tmp_path) == ("off", {})


def test_of_too_many_namespaces_the_strictest_are_kept(tmp_path: pathlib.Path) -> None:
    names = [f"n{number:05}" for number in range(state.MAX_NAMESPACES)]
    many = dict.fromkeys(reversed(names), Mode.ENFORCE)
    modes = {"a": Mode.AUDIT, **many, "z": Mode.STRICT}
    state.publish(tmp_path, NewPodModes(Mode.OFF, modes), Attachment.CLSACT)
    # Of those in one mode, the first by name.
    kept = {"z": "strict", **dict.fromkeys(names[:-1], "enforce")}
    assert modes_in(tmp_path) == ("off", kept)


@pytest.mark.looptime
@pytest.mark.parametrize("more", [0, 1])
async def test_namespaces_that_are_left_out_are_logged(tmp_path: pathlib.Path, more: int) -> None:
    modes = PodModes(Mode.AUDIT)
    with structlog.testing.capture_logs() as lines:
        async with running(tmp_path, modes):
            for number in range(state.MAX_NAMESPACES + more):
                modes.set_namespace(f"n{number}", {MODE_LABEL: "enforce"})
            await asyncio.sleep(30)
    left_out = [line["namespaces"] for line in lines if line["event"] is Event.CNI_STATE_TRUNCATED]
    assert left_out == [state.MAX_NAMESPACES + 1] * more


@pytest.mark.looptime
async def test_after_a_reboot_there_is_no_file_before_labels_are_read(
    tmp_path: pathlib.Path,
) -> None:
    modes = PodModes(Mode.AUDIT, is_complete=False)
    async with running(tmp_path, modes):
        modes.set_node({})
        await asyncio.sleep(30)
        assert not (tmp_path / "cni.json").exists()
        modes.set_namespace("shop", {MODE_LABEL: "enforce"})
        modes.complete()
        await until("the file", (tmp_path / "cni.json").exists)
        assert modes_in(tmp_path) == ("audit", {"shop": "enforce"})


@pytest.mark.looptime
@pytest.mark.parametrize("ceiling", [Mode.ENFORCE, Mode.STRICT])
async def test_labels_that_may_enforce_are_waited_for(
    tmp_path: pathlib.Path, ceiling: Mode
) -> None:
    async with running(tmp_path, PodModes(Mode.AUDIT, ceiling, is_complete=False)):
        await asyncio.sleep(30)
        assert not (tmp_path / "cni.json").exists()


@pytest.mark.looptime
async def test_labels_that_are_never_read_hold_new_pods_for_a_minute(
    tmp_path: pathlib.Path,
) -> None:
    async with running(tmp_path, PodModes(Mode.AUDIT, is_complete=False)):
        await asyncio.sleep(59)
        assert not (tmp_path / "cni.json").exists()
        await until("the file", (tmp_path / "cni.json").exists)
        assert modes_in(tmp_path) == ("audit", {})


@pytest.mark.parametrize(
    ("default", "ceiling"), [(Mode.ENFORCE, Mode.STRICT), (Mode.AUDIT, Mode.AUDIT)]
)
def test_labels_that_can_make_nothing_stricter_are_not_waited_for(
    tmp_path: pathlib.Path, default: Mode, ceiling: Mode
) -> None:
    opened(tmp_path, PodModes(default, ceiling, is_complete=False))
    assert modes_in(tmp_path)[0] == default.label
