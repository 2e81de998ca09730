"""Following a file or a directory of policies."""

import pathlib
from typing import Any

import msgspec
import pytest
import yaml

from agent.pods import documents
from agent.policy import api_types
from agent.policy.files import PolicyFiles


class Files:
    """A directory of policies, and what a source makes of it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.path = directory / "rules"
        self.path.mkdir()
        self.state = directory / "state" / "policies.json"
        self.source = PolicyFiles(self.path, state=self.state)

    def write(self, name: str, *given: Any) -> None:
        """Documents, or literal text."""
        text = [one if isinstance(one, str) else yaml.safe_dump(one) for one in given]
        unfinished = self.path / f".{name}"
        unfinished.write_text("---\n".join(text), encoding="utf-8")
        unfinished.rename(self.path / name)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def refresh(self) -> list[str]:
        """Names of the policies in force."""
        self.source.refresh()
        return sorted(policy.name for policy in self.source.batch.policies)

    def restart(self) -> None:
        self.source = PolicyFiles(self.path, state=self.state)
        self.source.restore()


def policy(name: str, port: int = 80) -> dict[str, Any]:
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": name},
        "spec": {
            "pods": {"podSelector": {}},
            "from": [{"anyProcess": {}}],
            "ports": [{"port": port}],
        },
    }


def wrong(name: str) -> dict[str, Any]:
    return {**policy(name), "spec": {"pods": {"podSelector": {}}}}


def full(document: dict[str, Any]) -> str:
    """The text of a file as large as may be."""
    text = yaml.safe_dump(document)
    return text + "#" * (documents.MAX_BYTES - len(text))


def ports(files: Files) -> dict[str, int]:
    return {policy.name: policy.rules[0].first_port for policy in files.source.batch.policies}


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Files:
    return Files(tmp_path)


def test_several_policies_a_file_and_several_files(files: Files) -> None:
    files.write("z.yaml", policy("c"), policy("a"))
    files.write("b.json", msgspec.json.encode(policy("b")).decode())
    files.write("c.txt", policy("d"))
    assert files.refresh() == ["a", "b", "c"]
    assert files.source.batch.problems == ()


def test_one_file_may_be_named(files: Files) -> None:
    files.write("a.yaml", policy("a"))
    files.write("b.yaml", policy("b"))
    source = PolicyFiles(files.path / "a.yaml", state=files.state)
    source.refresh()
    assert [policy.name for policy in source.batch.policies] == ["a"]
    files.write("a.yaml", policy("c"))
    assert source.refresh()
    assert [policy.name for policy in source.batch.policies] == ["c"]


def test_a_list_as_kubectl_writes_it(files: Files) -> None:
    files.write("a.yaml", {"kind": "List", "items": [policy("a"), policy("b")]})
    assert files.refresh() == ["a", "b"]


def test_nothing_has_changed_where_nothing_changed(files: Files) -> None:
    assert not files.source.refresh()
    files.write("a.yaml", policy("a"))
    assert files.source.refresh()
    assert not files.source.refresh()


@pytest.mark.parametrize("text", ["2026-12-01T10:00:00Z", '"2026-12-01T11:00:00+01:00"'])
def test_time_of_expiry_may_be_yamls_or_a_string(files: Files, text: str) -> None:
    content = yaml.safe_dump(policy("a")).replace("spec:", f"spec:\n  expires: {text}")
    files.write("a.yaml", content)
    assert files.refresh() == ["a"]
    files.restart()
    assert files.refresh() == ["a"]
    (found,) = files.source.batch.policies
    assert found.expires_text == "2026-12-01T10:00:00Z"


def test_changes_and_removals_are_followed(files: Files) -> None:
    files.write("a.yaml", policy("a"), policy("b"))
    files.refresh()
    files.write("a.yaml", policy("a", 81))
    assert files.refresh() == ["a"]
    assert ports(files) == {"a": 81}
    (files.path / "a.yaml").unlink()
    assert files.refresh() == []


def test_invalid_document_is_one_sentence_and_affects_no_other(files: Files) -> None:
    files.write("a.yaml", policy("a"), wrong("b"), policy("c"))
    assert files.refresh() == ["a", "c"]
    assert files.source.batch.problems == (
        "a.yaml, document 2 ('b'): spec: object missing required field `from`.",
    )


def test_invalid_policy_keeps_its_last_version(files: Files) -> None:
    files.write("a.yaml", policy("a"), policy("b"))
    files.refresh()
    files.write("a.yaml", policy("a", 81), wrong("b"))
    assert files.refresh() == ["a", "b"]
    assert ports(files) == {"a": 81, "b": 80}
    (problem,) = files.source.batch.problems
    assert problem.endswith("The last valid version stays in force.")


def test_a_document_without_a_name_may_be_any_that_was_there(files: Files) -> None:
    files.write("a.yaml", policy("a"), policy("b"))
    files.refresh()
    files.write("a.yaml", policy("a", 81), "text")
    assert files.refresh() == ["a", "b"]
    files.write("a.yaml", policy("a", 81))
    assert files.refresh() == ["a"]
    assert files.source.batch.problems == ()


@pytest.mark.parametrize("content", ["a: [", "[" * 5000, "\0"])
def test_a_file_that_cannot_be_read_keeps_what_it_held(files: Files, content: str) -> None:
    files.write("a.yaml", policy("a"))
    files.write("b.yaml", policy("b"))
    files.refresh()
    files.write("a.yaml", content)
    assert files.refresh() == ["a", "b"]
    assert len(files.source.batch.problems) == 1


def test_file_is_read_again_once_a_descriptor_is_free(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: pathlib.Path) -> list[object]:
        raise documents.BusyError(f"{path.name} cannot be read: Too many open files")

    files.write("a.yaml", policy("a"))
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(documents, "read_all", busy)
        assert files.refresh() == []
        assert list(files.source.batch.problems) == ["a.yaml cannot be read: Too many open files."]
    assert files.refresh() == ["a"]
    files.write("a.yaml", "a: [")
    assert [files.source.refresh() for _ in range(2)] == [True, False]


def test_a_mistake_does_not_outlive_the_agent_that_knew_better(files: Files) -> None:
    files.write("a.yaml", policy("a"))
    files.write("b.yaml", policy("b"))
    files.refresh()
    files.write("a.yaml", "a: [")
    (files.path / "b.yaml").unlink()
    files.restart()
    assert files.refresh() == ["a"]
    (problem,) = files.source.batch.problems
    assert "stays in force" in problem


def test_what_another_path_held_is_not_taken_up(files: Files, tmp_path: pathlib.Path) -> None:
    files.write("a.yaml", policy("a"))
    files.refresh()
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.yaml").write_text("a: [", encoding="utf-8")
    source = PolicyFiles(other, state=files.state)
    source.restore()
    source.refresh()
    assert source.batch.policies == ()


@pytest.mark.parametrize("content", [b"", b"{", b'{"path": 1}', b"\xff"])
def test_saved_policies_that_are_spoilt_are_left(files: Files, content: bytes) -> None:
    files.write("a.yaml", policy("a"))
    files.state.parent.mkdir()
    files.state.write_bytes(content)
    files.restart()
    assert files.refresh() == ["a"]


def test_saved_policy_of_another_version_is_left_and_the_others_restored(files: Files) -> None:
    files.write("a.yaml", policy("a"), policy("b"))
    files.refresh()
    saved = msgspec.json.decode(files.state.read_bytes())
    saved["files"]["a.yaml"][0]["spec"]["later"] = True
    files.state.write_bytes(msgspec.json.encode(saved))
    files.write("a.yaml", "a: [")
    files.restart()
    assert files.refresh() == ["b"]


def test_second_policy_of_a_name_is_rejected_while_the_first_exists(files: Files) -> None:
    files.write("b.yaml", policy("a", 1))
    files.refresh()
    files.write("a.yaml", policy("a", 2), policy("b"))
    assert files.refresh() == ["a", "b"]
    assert ports(files)["a"] == 1
    (problem,) = files.source.batch.problems
    assert "a.yaml, document 1 has policy a, which b.yaml" in problem
    (files.path / "b.yaml").unlink()
    files.refresh()
    assert ports(files)["a"] == 2


def test_the_same_name_twice_in_a_file(files: Files) -> None:
    files.write("a.yaml", policy("a", 1), policy("a", 2))
    files.refresh()
    assert ports(files) == {"a": 1}
    assert "twice" in files.source.batch.problems[0]


def test_missing_directory_keeps_all_policies(files: Files) -> None:
    files.write("a.yaml", policy("a"))
    files.refresh()
    hidden = files.path.with_name("hidden")
    files.path.rename(hidden)
    assert [files.source.refresh() for _ in range(3)] == [True, False, False]
    assert files.refresh() == ["a"]
    assert list(files.source.batch.problems) == [
        f"{files.path} cannot be read (No such file or directory); using the last known policies."
    ]
    hidden.rename(files.path)
    assert [files.source.refresh() for _ in range(2)] == [True, False]
    assert files.refresh() == ["a"]
    assert files.source.batch.problems == ()


def test_policies_beyond_the_counters_are_skipped(files: Files) -> None:
    most = api_types.MAX_POLICIES
    files.write("z.yaml", policy("first"))
    files.refresh()
    for number in range(4):
        entries = [policy(f"p{number}-{index}") for index in range(most // 4)]
        text = msgspec.json.encode({"kind": "List", "items": entries}).decode()
        files.write(f"{number}.json", text)
    names = files.refresh()
    assert len(names) == most
    assert "first" in names
    (problem,) = files.source.batch.problems
    assert "has 1 policies more than the maximum of 2,048" in problem


def test_files_beyond_the_size_limit_wait_for_room(files: Files) -> None:
    files.write("z.yaml", policy("z"))
    files.refresh()
    for number in range(5):
        files.write(f"{number}.yaml", full(policy(f"p{number}")))
    files.write("z.yaml", full(policy("z", 81)))
    assert files.refresh() == ["p0", "p1", "p2", "z"]
    assert ports(files)["z"] == 81, "a new file must not displace it"
    problems = files.source.batch.problems
    assert [problem.split(":")[0] for problem in problems] == ["3.yaml", "4.yaml"]
    assert not files.source.refresh()
    (files.path / "1.yaml").unlink()
    assert files.refresh() == ["p0", "p2", "p3", "z"]


def test_files_may_fill_the_size_limit(files: Files) -> None:
    names = ["p0", "p1", "p2", "p3"]
    for name in names:
        files.write(f"{name}.yaml", full(policy(name)))
    assert files.refresh() == names
    assert files.source.batch.problems == ()


def test_hundred_thousand_mistakes_in_a_file_are_abridged(files: Files) -> None:
    files.write("z.yaml", policy("z"))
    files.refresh()
    many = [{"port": port} for port in range(1, 65535, 2)]
    huge = {**policy("huge"), "spec": {**policy("huge")["spec"], "ports": many}}
    files.write("a.json", msgspec.json.encode(huge).decode())
    files.write("b.yaml", "---\n".join(f"a{number}: b\n" for number in range(100_000)))
    files.write("c.yaml", "\n---\n".join("x" for _ in range(100_000)))
    assert files.refresh() == ["z"]
    about = [[one for one in files.source.batch.problems if one.startswith(name)] for name in "abc"]
    assert len(about[0]) == 1
    assert "more rules than the 32" in about[0][0]
    assert len(about[1]) == 1
    assert len(about[2]) == 21
    assert "99,980 more problems" in about[2][-1]


def test_a_problem_is_not_longer_than_a_paragraph(files: Files) -> None:
    files.write("a.yaml", {**policy("a"), "kind": "x" * 100_000}, policy("b" * 100_000))
    files.refresh()
    assert all(len(problem) < 600 for problem in files.source.batch.problems)


def test_only_a_rejected_policy_that_was_good_uses_its_last_good_one(
    tmp_path: pathlib.Path,
) -> None:
    files = Files(tmp_path)
    files.write("a.yaml", policy("a"))
    assert files.refresh() == ["a"]
    files.write("a.yaml", wrong("a"), wrong("b"))
    assert files.refresh() == ["a"]
    of_a, of_b = files.source.batch.problems
    assert ("'a'" in of_a, "'b'" in of_b) == (True, True)
    assert "last valid" in of_a
    assert "last valid" not in of_b


def test_document_without_a_name_uses_what_it_may_have_replaced(tmp_path: pathlib.Path) -> None:
    files = Files(tmp_path)
    files.write("a.yaml", policy("a"))
    files.refresh()
    files.write("a.yaml", {"kind": "HostAccessPolicy"})
    assert files.refresh() == ["a"]
    (problem,) = files.source.batch.problems
    assert "last valid" in problem
    files.write("b.yaml", {"kind": "HostAccessPolicy"})
    files.refresh()
    assert ["last valid" in one for one in files.source.batch.problems] == [True, False]
