"""Policies from a file or a directory of files, several per file, followed while they change."""

import dataclasses
import pathlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, Generic

import msgspec

from agent import labels
from agent.linux import directory_changes
from agent.pods import documents
from agent.policy import api_types, effective
from agent.policy import saved as saved_policies
from agent.policy.api_types import HOST_ACCESS, Policy
from agent.policy.effective import PolicyBatch
from agent.policy.kinds import P, PolicyError, PolicyKind

# Of all files. A policy has some 300 bytes, so this is more than can be in force.
_MAX_TOTAL_BYTES = 4 * documents.MAX_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class _PolicyFile(Generic[P]):
    """One file. problems: one sentence each; is_within_limit: false if it was too much to read."""

    stamp: documents.Stamp
    policies: tuple[P, ...]
    problems: tuple[str, ...] = ()
    is_within_limit: bool = True


class _SavedPolicyFiles(msgspec.Struct):
    """The policies in force, by file: a mistake in a file must not drop them at a restart."""

    path: str
    files: dict[str, list[Any]]


class FilePolicies(Generic[P]):
    """A `PolicyProvider`: a file or directory, of whose documents it reads one kind."""

    def __init__(self, kind: PolicyKind[P], path: pathlib.Path, *, state: pathlib.Path) -> None:
        """state: the file that stores the policies in force."""
        self._kind = kind
        self._path = path
        is_directory = path.is_dir()
        self._directory = path if is_directory else path.parent
        self._only = None if is_directory else path.name
        self._state = state
        # In order of arrival: of two policies with one name, the first stays in force.
        self._files: dict[str, _PolicyFile[P]] = {}
        self._was_readable = True
        self.batch: PolicyBatch[P] = PolicyBatch(str(path))
        """The policies in force, and one sentence for each invalid document."""

    @property
    def name(self) -> str:
        return str(self._path)

    problem = ""
    """An unreadable directory is one of the batch's problems."""

    def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        return directory_changes.follow(
            self._directory, at_least_every_seconds=at_least_every_seconds
        )

    def restore(self) -> None:
        """Restore what the previous run saved, for files that are invalid now."""
        saved = saved_policies.read(self._state, _SavedPolicyFiles)
        if saved is None or saved.path != str(self._path):
            return
        for name, kept in saved.files.items():
            good = saved_policies.checked(kept, self._kind, source=name)
            self._files[name] = _PolicyFile(documents.NEVER_READ, good)

    def refresh(self) -> bool:
        """Read changed files; returns whether there were any.

        The last valid version of a document that became invalid stays in force, with its problem
        reported. If the directory cannot be read, all policies stay.
        """
        try:
            stamps = documents.stamps(self._directory, self._only)
        except OSError as error:
            self._was_readable = False
            problem = (
                f"{self._directory} cannot be read ({error.strerror}); using the last known "
                "policies."
            )
            is_new = self.batch.problems != (problem,)
            self.batch = dataclasses.replace(self.batch, problems=(problem,))
            return is_new
        files = {name: file for name, file in self._files.items() if name in stamps}
        settled = {
            name
            for name, file in files.items()
            if file.stamp == stamps[name] and file.is_within_limit
        }
        room = _MAX_TOTAL_BYTES - sum(stamps[name][1] for name in settled)
        to_read = [
            name
            for name in stamps.keys() - settled
            if name not in files or files[name].stamp != stamps[name] or stamps[name][1] <= room
        ]
        if not to_read and len(files) == len(self._files) and self._was_readable:
            return False
        self._was_readable = True
        # Known files first: a new one must not displace them.
        for name in sorted(to_read, key=lambda name: (name not in files, name)):
            before = files[name].policies if name in files else ()
            if stamps[name][1] > room:
                problem = effective.sentence(
                    f"{name}: the files together are larger than 4 MiB", uses_last_good=bool(before)
                )
                files[name] = _PolicyFile(stamps[name], before, (problem,), is_within_limit=False)
            else:
                room -= stamps[name][1]
                files[name] = self._read(name, stamps[name], before)
        self._files = files
        self.batch = effective.join(
            (PolicyBatch(name, file.policies, file.problems) for name, file in files.items()),
            name=str(self._path),
        )
        kept = {name: [one.document for one in file.policies] for name, file in files.items()}
        saved_policies.write(self._state, _SavedPolicyFiles(str(self._path), kept))
        return True

    def _read(self, name: str, stamp: documents.Stamp, before: tuple[P, ...]) -> _PolicyFile[P]:
        try:
            read = documents.read_all(self._directory / name)
            found = list(_of_kind(self._kind.name, _expanded(read)))
        except documents.DocumentError as error:
            is_busy = isinstance(error, documents.BusyError)
            return _PolicyFile(
                documents.NEVER_READ if is_busy else stamp,
                before,
                (effective.sentence(str(error), uses_last_good=bool(before)),),
            )
        good: dict[str, P] = {}
        rejected: list[tuple[str | None, str]] = []
        for number, document in enumerate(found, start=1):
            policy_name = api_types.name_of(document)
            where = f"{name}, document {number}" + (f" ({policy_name!r})" if policy_name else "")
            try:
                policy = self._kind.read(document, f"{name}, document {number}")
                if policy.name in good:
                    raise PolicyError("the file contains this policy twice; remove one of the two")
                good[policy.name] = policy
            except PolicyError as error:
                rejected.append((policy_name, f"{where}: {error}"))
        invalid = {policy_name for policy_name, _ in rejected}
        # A document without a name may be any of the previous ones.
        kept = {
            policy.name: policy
            for policy in before
            if policy.name not in good and (policy.name in invalid or None in invalid)
        }
        problems = [
            effective.sentence(
                problem, uses_last_good=policy_name in kept or (policy_name is None and bool(kept))
            )
            for policy_name, problem in rejected
        ]
        return _PolicyFile(
            stamp, (*good.values(), *kept.values()), tuple(effective.abridged(problems, name))
        )


def _expanded(found: Iterable[object]) -> Iterable[object]:
    """Documents, with lists (as kubectl writes them) replaced by their items."""
    for document in found:
        if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
            items = document.get("items")
            yield from items if isinstance(items, list) else [document]
        else:
            yield document


class PolicyFiles(FilePolicies[Policy]):
    """HostAccessPolicies of a file or directory."""

    def __init__(self, path: pathlib.Path, *, state: pathlib.Path) -> None:
        super().__init__(HOST_ACCESS, path, state=state)


def _of_kind(kind: str, found: Iterable[object]) -> Iterable[object]:
    """Documents without those of podgate's other kinds, which others read."""
    for document in found:
        named = document.get("kind") if isinstance(document, dict) else None
        if named == kind or named not in labels.POLICY_KINDS:
            yield document


def load(path: pathlib.Path) -> list[Policy]:
    """All policies of a file or directory, once. Raises `PolicyError` or `DocumentError` for the
    first mistake."""
    if not path.exists():
        raise PolicyError(f"{path} does not exist")
    is_directory = path.is_dir()
    directory = path if is_directory else path.parent
    found = []
    for name in sorted(documents.stamps(directory, None if is_directory else path.name)):
        read = _of_kind(HOST_ACCESS.name, _expanded(documents.read_all(directory / name)))
        for number, document in enumerate(read, start=1):
            where = f"{name}, document {number}"
            try:
                found.append(api_types.read(document, source=where))
            except PolicyError as error:
                raise PolicyError(f"{where}: {error}") from error
    return found
