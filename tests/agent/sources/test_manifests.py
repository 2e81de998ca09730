"""Pods of a directory of manifests."""

import asyncio
import contextlib
import errno
import json
import os
import pathlib
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from agent import labels
from agent.logs import Event
from agent.pods import documents
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod, Problem
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.sources.manifests import ManifestDirectory
from bpf.verdicts import Mode
from tests import polling
from tests.blocking import may_block


class Recorder(PodStore):
    """Changes of the store, in order."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(Conditions())
        self.directory = directory
        self.changes: list[str] = []
        self.changed = asyncio.Event()
        self.modes = PodModes(Mode.AUDIT)
        self.source = ManifestDirectory(directory, self, self.modes)

    def set_pod(self, pod: Pod) -> None:
        super().set_pod(pod)
        self.changes.append(f"+{pod.name}")
        self.changed.set()

    def remove_pod(self, uid: str) -> None:
        self.changes.append(f"-{self.pods[uid].pod.name}")
        super().remove_pod(uid)
        self.changed.set()

    def write(self, file: str, content: str) -> None:
        # As an editor does it: never a half-written file under the final name.
        unfinished = self.directory / f".{file}"
        unfinished.write_text(content, encoding="utf-8")
        unfinished.rename(self.directory / file)

    def pod(self, name: str) -> Pod:
        return next(pod for pod in self.desired_pods() if pod.name == name)


def manifest(name: str, *, mode: str = "audit", uid: str = "") -> str:
    return json.dumps(
        {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "uid": uid,
                "labels": {labels.MODE_LABEL: mode},
                "annotations": {labels.NETNS_ANNOTATION: f"/run/netns/{name}"},
            },
            "spec": {"containers": [{"name": "app"}]},
        }
    )


@pytest.fixture
def recorder(tmp_path: pathlib.Path) -> Recorder:
    return Recorder(tmp_path)


def test_yaml_and_json_files_are_read_and_others_are_not(recorder: Recorder) -> None:
    for file in ("a.yaml", "b.yml", "c.json", "d.txt", ".e.yaml"):
        recorder.write(file, manifest(file[0] if file[0] != "." else "e"))
    recorder.source.refresh()
    assert recorder.changes == ["+a", "+b", "+c"]


def test_unchanged_file_is_not_published_again(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a"))
    recorder.source.refresh()
    recorder.source.refresh()
    assert recorder.changes == ["+a"]


def test_changed_file_is_published_again(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a"))
    recorder.source.refresh()
    recorder.write("a.yaml", manifest("a", mode="enforce"))
    recorder.source.refresh()
    assert recorder.changes == ["+a", "+a"]
    assert recorder.pod("a").mode is Mode.ENFORCE


def test_removed_file_removes_its_pod(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a"))
    recorder.source.refresh()
    (recorder.directory / "a.yaml").unlink()
    recorder.source.refresh()
    assert recorder.changes == ["+a", "-a"]


def test_file_with_another_pod_removes_the_old_one(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a"))
    recorder.source.refresh()
    recorder.write("a.yaml", manifest("other"))
    recorder.source.refresh()
    assert recorder.changes == ["+a", "-a", "+other"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: [", "not YAML at line"),
        ("a: b\n\nc: [}\n", "bad.yaml is not YAML at line 3: "),
        ("\x00", "not YAML"),
        ("kind: Service\nmetadata: {name: x}", "not a pod manifest"),
        ("[" * 5000, "nested"),
        ("a: b\n---\nc: d\n", "2 documents"),
        ("a: &a [1]\nb: &b [" + "*a," * 999 + "]\nc: [" + "*b," * 999 + "]", "anchor or alias"),
        ("kind: &kind Pod\n", "bad.yaml has a YAML anchor or alias"),
        ("a:\n" + "- 1\n" * 20_001, "20,000 values"),
    ],
)
def test_invalid_manifest_is_one_problem(recorder: Recorder, content: str, text: str) -> None:
    recorder.write("a.yaml", manifest("a"))
    recorder.write("bad.yaml", content)
    recorder.source.refresh()
    assert recorder.changes == ["+a", "+bad.yaml"]
    problem = recorder.pod("bad.yaml").manifest_problem
    assert problem is not None
    assert text in f"{problem.reason} {problem.message}"
    assert "bad.yaml" in problem.message


NO_POD = "bad.yaml is not a pod manifest"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param("a:\n" + "- 1\n" * 19_997, NO_POD, id="values"),
        pytest.param(
            "a:\n" + "- 1\n" * 19_998,
            "bad.yaml has a document of more than 20,000 values; split it.",
            id="too many values",
        ),
        pytest.param(
            "- 1\n" * 15_000 + "---\n" + "- 1\n" * 15_000,
            "bad.yaml holds 2 documents",
            id="values of two documents",
        ),
        pytest.param("[" * 100 + "]" * 100, NO_POD, id="depth"),
        pytest.param("[" * 101 + "]" * 101, "bad.yaml is nested more than 100 deep.", id="deeper"),
        pytest.param("- []\n" * 200, NO_POD, id="beside each other"),
        pytest.param("#" * (1 << 20), NO_POD, id="size"),
        pytest.param("#" * ((1 << 20) + 1), "bad.yaml is larger than 1 MiB.", id="larger"),
    ],
)
def test_largest_file_is_read(recorder: Recorder, content: str, text: str) -> None:
    recorder.write("bad.yaml", content)
    recorder.source.refresh()
    problem = recorder.pod("bad.yaml").manifest_problem
    assert problem is not None
    assert problem.message.startswith(text)


def test_json_file_must_be_json(recorder: Recorder) -> None:
    recorder.write("bad.json", "kind: Pod")
    recorder.source.refresh()
    problem = recorder.pod("bad.json").manifest_problem
    assert problem is not None
    assert "not JSON" in problem.message


def test_link_to_a_missing_file_is_no_manifest(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a"))
    (recorder.directory / "b.yaml").symlink_to("missing")
    recorder.write("c.yaml", manifest("c"))
    recorder.source.refresh()
    assert recorder.changes == ["+a", "+c"]


def test_directory_with_the_name_of_a_manifest_is_its_problem(recorder: Recorder) -> None:
    (recorder.directory / "a.yaml").mkdir()
    recorder.source.refresh()
    text = "a.yaml cannot be read: Is a directory."
    assert recorder.pod("a.yaml").manifest_problem == Problem("InvalidManifest", text)


@may_block("the agent reads once before all else")
def start(recorder: Recorder) -> None:
    recorder.source.refresh()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_file_is_read_again_where_no_descriptor_is_free(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_: pathlib.Path) -> bytes:
        raise OSError(number, os.strerror(number))

    await asyncio.to_thread(recorder.write, "a.yaml", manifest("a"))
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", fail)
        start(recorder)
        assert recorder.changes == []
    start(recorder)
    assert recorder.changes == ["+a"]
    assert recorder.pod("a").manifest_problem is None


def test_huge_file_is_not_read(recorder: Recorder) -> None:
    recorder.write("big.yaml", " " * (1 << 21))
    recorder.source.refresh()
    problem = recorder.pod("big.yaml").manifest_problem
    assert problem is not None
    assert "1 MiB" in problem.message


def test_invalid_file_keeps_its_last_pod(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a", mode="enforce"))
    recorder.source.refresh()
    recorder.write("a.yaml", "a: [")
    recorder.source.refresh()
    pod = recorder.pod("a")
    assert pod.mode is Mode.ENFORCE
    assert pod.netns_path == "/run/netns/a"
    assert pod.manifest_problem is not None
    assert "last valid version stays in force" in pod.manifest_problem.message


def test_unreadable_mode_of_a_new_manifest_counts_as_none(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a", mode="enfroce"))
    recorder.source.refresh()
    pod = recorder.pod("a")
    assert pod.mode is Mode.AUDIT
    assert pod.netns_path == "/run/netns/a"
    [problem] = pod.mode_problems
    assert problem.reason == "InvalidMode"


def test_unreadable_mode_of_a_changed_manifest_affects_no_other_field(
    recorder: Recorder,
) -> None:
    recorder.write("a.yaml", manifest("a", mode="enforce"))
    recorder.source.refresh()
    changed = manifest("a", mode="enfroce").replace("/run/netns/a", "/run/netns/b")
    recorder.write("a.yaml", changed)
    recorder.source.refresh()
    pod = recorder.pod("a")
    assert (pod.mode, pod.netns_path) == (Mode.ENFORCE, "/run/netns/b")
    assert "Its last valid value enforce stays" in pod.mode_problems[0].message
    # Another pod in the same file has no last value.
    recorder.write("a.yaml", manifest("b", mode="enfroce"))
    recorder.source.refresh()
    recorder.write("a.yaml", manifest("a", mode="enfroce"))
    recorder.source.refresh()
    assert recorder.pod("a").mode is Mode.AUDIT


def test_invalid_manifest_is_never_in_mode_off(recorder: Recorder) -> None:
    recorder.write("a.yaml", "a: [")
    recorder.source.refresh()
    assert recorder.pod("a.yaml").mode is Mode.AUDIT


def test_repaired_file_has_no_problem(recorder: Recorder) -> None:
    recorder.write("a.yaml", "a: [")
    recorder.source.refresh()
    recorder.write("a.yaml", manifest("a"))
    recorder.source.refresh()
    assert recorder.changes == ["+a.yaml", "-a.yaml", "+a"]
    assert recorder.pod("a").manifest_problem is None


def test_second_file_of_a_pod_is_rejected(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a", mode="enforce"))
    recorder.write("b.yaml", manifest("a", mode="off"))
    recorder.source.refresh()
    assert recorder.pod("a").mode is Mode.ENFORCE
    problem = recorder.pod("b.yaml").manifest_problem
    assert problem is not None
    assert problem.reason == "DuplicatePod"
    assert "a.yaml" in problem.message


def test_second_file_is_used_when_the_first_is_removed(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a", mode="enforce"))
    recorder.write("b.yaml", manifest("a", mode="audit"))
    recorder.source.refresh()
    (recorder.directory / "a.yaml").unlink()
    recorder.source.refresh()
    assert recorder.pod("a").mode is Mode.AUDIT
    assert len(recorder.pods) == 1


def test_renamed_file_keeps_its_pod(recorder: Recorder) -> None:
    recorder.write("a.yaml", manifest("a"))
    recorder.source.refresh()
    (recorder.directory / "a.yaml").rename(recorder.directory / "z.yaml")
    recorder.source.refresh()
    assert recorder.pod("a").source == "z.yaml"


def test_invalid_file_is_a_pod_of_its_name_with_the_problem(recorder: Recorder) -> None:
    recorder.write("a.yaml", "kind: Service\nmetadata: {name: x}")
    recorder.write("b.json", "{")
    recorder.source.refresh()
    assert recorder.pod("b.json") == Pod(
        uid="file:b.json",
        namespace="",
        name="b.json",
        source="b.json",
        mode=Mode.AUDIT,
        manifest_problem=Problem(
            "InvalidManifest", "b.json is not JSON: Input data was truncated."
        ),
    )
    assert recorder.pod("a.yaml").uid == "file:a.yaml"


def test_invalid_file_keeps_its_last_pod_until_it_is_repaired(recorder: Recorder) -> None:
    recorder.write("a.json", manifest("a"))
    recorder.source.refresh()
    valid = recorder.pod("a")
    for _ in range(2):
        recorder.write("a.json", "{")
        recorder.source.refresh()
        assert recorder.pod("a").manifest_problem == Problem(
            "InvalidManifest",
            "a.json is not JSON: Input data was truncated. The last valid version stays in force.",
        )
    recorder.write("a.json", manifest("a"))
    recorder.source.refresh()
    assert recorder.pod("a") == valid
    assert recorder.changes == 4 * ["+a"]


@pytest.mark.parametrize(
    ("uids", "names", "are_same"),
    [
        (("one", "one"), ("a", "b"), True),
        (("one", "two"), ("a", "a"), True),
        (("one", "two"), ("a", "b"), False),
    ],
)
def test_pods_of_one_uid_or_one_name_are_the_same(
    recorder: Recorder, uids: tuple[str, str], names: tuple[str, str], *, are_same: bool
) -> None:
    for file, uid, name in zip(("x.json", "y.json"), uids, names, strict=True):
        recorder.write(file, manifest(name, uid=uid))
    recorder.source.refresh()
    problems = [pod.manifest_problem for pod in recorder.desired_pods()]
    text = f"y.json has pod default/{names[1]}, which x.json already has; remove one of the two."
    assert problems == [None, Problem("DuplicatePod", text) if are_same else None]


def test_pod_of_a_file_that_was_never_valid_is_free(recorder: Recorder) -> None:
    recorder.write("a.json", "{")
    recorder.source.refresh()
    recorder.write("b.json", manifest("a.json", uid="file:a.json"))
    recorder.source.refresh()
    assert recorder.changes == ["+a.json", "+a.json"]
    assert recorder.pod("a.json").manifest_problem is None


def test_only_duplicates_are_read_again_when_a_file_is_removed(recorder: Recorder) -> None:
    for file in ("a.json", "b.json", "c.json"):
        recorder.write(file, manifest("one"))
    recorder.write("d.json", "{")
    recorder.source.refresh()
    recorder.changes.clear()
    (recorder.directory / "a.json").unlink()
    recorder.source.refresh()
    assert recorder.changes == ["-one", "-b.json", "+one", "+c.json"]


def busy(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """No file descriptor is free when these are read."""
    read_one = documents.read_one

    def read(path: pathlib.Path) -> object:
        if path.name in names:
            raise documents.BusyError(f"{path.name} cannot be read")
        return read_one(path)

    monkeypatch.setattr(documents, "read_one", read)


@contextlib.asynccontextmanager
async def running(recorder: Recorder) -> AsyncIterator[None]:
    task = asyncio.create_task(recorder.source.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_file_that_cannot_be_read_now_stays_as_it_was(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = asyncio.get_running_loop().time
    recorder.write("a.json", manifest("a"))
    async with running(recorder):
        await polling.until("the file", lambda: recorder.changes == ["+a"])
        assert recorder.source.read_at == pytest.approx(now(), abs=1.0)
        with monkeypatch.context() as patch:
            busy(patch, "a.json", "b.json")
            recorder.write("a.json", manifest("a", mode="enforce"))
            recorder.write("b.json", manifest("b"))
            recorder.write("c.json", manifest("c"))
            await polling.until("the other file", lambda: recorder.changes == ["+a", "+c"])
            failed_at = recorder.source.read_at
            recorder.write("d.json", manifest("d"))
            await polling.until("another scan", lambda: recorder.changes == ["+a", "+c", "+d"])
            assert recorder.source.read_at == failed_at < now()
        recorder.write("e.json", manifest("e"))
        await polling.until("all files", lambda: len(recorder.changes) == 6)
        assert recorder.changes[3:] == ["+a", "+b", "+e"]
        assert recorder.pod("a").mode is Mode.ENFORCE
        assert failed_at < recorder.source.read_at


def test_missing_directory_is_an_error(recorder: Recorder) -> None:
    with pytest.raises(FileNotFoundError):
        ManifestDirectory(recorder.directory / "none", recorder, recorder.modes).refresh()


async def test_pods_stay_while_the_directory_cannot_be_read(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = documents.stamps
    is_allowed = True

    def allowed(directory: pathlib.Path) -> dict[str, documents.Stamp]:
        if not is_allowed:
            raise PermissionError(13, "Permission denied")
        return stamps(directory)

    monkeypatch.setattr(documents, "stamps", allowed)
    recorder.write("a.json", manifest("a"))
    with structlog.testing.capture_logs() as lines:
        async with running(recorder):
            await polling.until("the file", lambda: recorder.changes == ["+a"])
            is_allowed = False
            recorder.write("b.json", manifest("b"))
            await polling.until("the error", lambda: lines)
            read_at = recorder.source.read_at
            assert (recorder.changes, read_at) == (["+a"], recorder.source.read_at)
            is_allowed = True
            recorder.write("c.json", manifest("c"))
            await polling.until("both files", lambda: recorder.changes == ["+a", "+b", "+c"])
            assert recorder.source.read_at > read_at
    assert {line["event"] for line in lines} == {Event.MANIFESTS_UNREADABLE}


async def test_modes_of_the_node_are_followed(recorder: Recorder) -> None:
    recorder.write("a.json", manifest("a"))
    recorder.write("b.json", "{")
    async with running(recorder):
        await polling.until("both files", lambda: len(recorder.changes) >= 2)
        recorder.modes.set_off(is_off=True)
        await polling.until("the mode", lambda: recorder.pod("a").mode is Mode.OFF)
        recorder.modes.set_off(is_off=False)
        await polling.until("the mode before", lambda: recorder.pod("a").mode is Mode.AUDIT)


async def test_changes_are_read_while_running(recorder: Recorder) -> None:
    following = asyncio.create_task(recorder.source.run())
    try:
        async with asyncio.timeout(10):
            while not recorder.changes:
                # The watcher may not be listening yet: write until it is.
                recorder.write("a.yaml", manifest("a"))
                try:
                    async with asyncio.timeout(0.5):
                        await recorder.changed.wait()
                except TimeoutError:
                    continue
    finally:
        following.cancel()
    assert recorder.changes[0] == "+a"
