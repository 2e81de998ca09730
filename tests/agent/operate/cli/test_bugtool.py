"""The archive of `podgate bugtool`: parts that fail or hang, and what is left out."""

import datetime
import io
import json
import tarfile
import threading
from typing import Any

from agent import VERSION
from agent.operate.cli import bugtool
from agent.operate.cli.bugtool import Part
from agent.operate.cli.bugtool_parts import shown_options
from agent.operate.cli.redaction import LEFT_OUT


def archived(content: bytes) -> dict[str, str]:
    """Files by name, without the directory that has the time."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        files = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            files[member.name.partition("/")[2]] = file.read().decode()
        return files


def manifest_of(content: bytes) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(archived(content)["manifest.json"])
    return made


def test_parts_are_files_and_listed() -> None:
    parts = [Part("a/one.json", lambda: {"n": 1}), Part("two.txt", lambda: "text")]
    content, _ = bugtool.collect(parts, agent="")
    files = archived(content)
    assert json.loads(files["a/one.json"]) == {"n": 1}
    assert files["two.txt"] == "text"
    manifest = manifest_of(content)
    for part in manifest["parts"]:
        assert 0 <= part.pop("seconds") < 30
    created = manifest.pop("created")
    one = files["a/one.json"]
    assert manifest == {
        "version": VERSION,
        "agent": "",
        "parts": [
            {"file": "a/one.json", "bytes": len(one), "redacted": 0, "problem": ""},
            {"file": "two.txt", "bytes": 4, "redacted": 0, "problem": ""},
        ],
        "leftOut": list(bugtool.LEFT_OUT),
    }
    assert list(files) == ["a/one.json", "two.txt", "manifest.json"]
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        at = datetime.datetime.fromisoformat(created)
        assert {member.mtime for member in archive.getmembers()} == {int(at.timestamp())}
        assert {member.name.partition("/")[0] for member in archive.getmembers()} == {
            f"podgate-bugtool-{at:%Y%m%dT%H%M%SZ}"
        }


def test_part_without_content_is_only_listed() -> None:
    content, made = bugtool.collect([Part("one.txt", str), Part("two.txt", bytes)], agent="")
    assert list(archived(content)) == ["manifest.json"]
    assert [(part.file, part.bytes, part.problem) for part in made.parts] == [
        ("one.txt", 0, ""),
        ("two.txt", 0, ""),
    ]


def test_failed_part_is_recorded_and_the_others_follow() -> None:
    def fail() -> str:
        raise OSError("no such thing; token=hunter2")

    parts = [Part("one.txt", fail), Part("two.txt", lambda: "text")]
    content, _ = bugtool.collect(parts, agent="no agent responds")
    assert "one.txt" not in archived(content)
    assert archived(content)["two.txt"] == "text"
    manifest = manifest_of(content)
    failed = manifest["parts"][0]
    assert (failed["problem"], failed["bytes"], failed["redacted"]) == (
        f"OSError: no such thing; token={LEFT_OUT}",
        *(0, 1),
    )
    assert manifest["agent"] == "no agent responds"


def test_part_that_hangs_ends_at_its_limit() -> None:
    released = threading.Event()

    def hang() -> str:
        released.wait(60)
        return "late"

    parts = [Part("one.txt", hang), Part("two.txt", lambda: "text")]
    content, _ = bugtool.collect(parts, agent="", limit_seconds=0.05)
    released.set()
    assert "one.txt" not in archived(content)
    assert manifest_of(content)["parts"][0]["problem"] == "no result within 0.05 s"


def test_secrets_in_parts_are_replaced_and_counted() -> None:
    content, _ = bugtool.collect([Part("log.txt", lambda: "a password=hunter2 b")], agent="")
    assert archived(content)["log.txt"] == f"a password={LEFT_OUT} b"
    assert manifest_of(content)["parts"][0]["redacted"] == 1


def test_large_part_has_its_end() -> None:
    text = "x" * (16 << 20) + "end"
    content, _ = bugtool.collect([Part("log.txt", lambda: text)], agent="")
    part = manifest_of(content)["parts"][0]
    assert part["bytes"] == 16 << 20
    assert part["problem"] == "cut to its last 16 MiB"
    assert archived(content)["log.txt"].endswith("xend")


def test_only_options_of_this_version_are_shown() -> None:
    arguments = ["python", "-m", "agent", "run", "--mode", "audit", "--strict-without-fallback"]
    arguments += ["--attach=tcx", "--from-the-future", "hunter2", "positional"]
    assert shown_options(arguments) == [
        *("--mode", "audit", "--strict-without-fallback", "--attach=tcx"),
        *(LEFT_OUT, LEFT_OUT, LEFT_OUT),
    ]
    assert shown_options(["python", "something-else", "hunter2"]) == []


def test_what_follows_a_flag_or_a_whole_option_is_not_shown() -> None:
    for option in ("--attach=tcx", "--strict-without-fallback"):
        assert shown_options(["podgate", "run", option, "hunter2"]) == [option, LEFT_OUT]


def test_files_are_their_owners_alone() -> None:
    content, _ = bugtool.collect([Part("one.txt", lambda: "text")], agent="")
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        assert {member.mode for member in archive.getmembers()} == {0o600}
