"""Pods of a directory of manifests."""

import asyncio
import json
import pathlib

import pytest

from agent import labels
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.sources.manifests import ManifestDirectory
from bpf.verdicts import Mode


class Recorder(PodStore):
    """Changes of the store, in order."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(Conditions())
        self.directory = directory
        self.changes: list[str] = []
        self.changed = asyncio.Event()
        self.source = ManifestDirectory(directory, self, PodModes(Mode.AUDIT))

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


def test_json_file_must_be_json(recorder: Recorder) -> None:
    recorder.write("bad.json", "kind: Pod")
    recorder.source.refresh()
    problem = recorder.pod("bad.json").manifest_problem
    assert problem is not None
    assert "not JSON" in problem.message


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


async def test_changes_are_read_while_running(recorder: Recorder) -> None:
    running = asyncio.create_task(recorder.source.run())
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
        running.cancel()
    assert recorder.changes[0] == "+a"
