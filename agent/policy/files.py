"""Policies from a file or a directory of files, several a file, followed while it changes."""

import dataclasses
import pathlib
from collections.abc import AsyncIterator, Iterable

import msgspec

from agent.pods import documents
from agent.policy import api_types, effective
from agent.policy import saved as saved_policies
from agent.policy.api_types import HostAccessPolicy, Policy, PolicyError
from agent.policy.effective import PolicyBatch

# All files together. A policy has some 300 bytes, so this is more than may be in force.
_MAX_TOTAL_BYTES = 4 * documents.MAX_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class _PolicyFile:
    """What is known of one file. problems: one sentence each; fits: there was room for it."""

    stamp: documents.Stamp
    policies: tuple[Policy, ...]
    problems: tuple[str, ...] = ()
    is_within_limit: bool = True


class _SavedPolicyFiles(msgspec.Struct):
    """What was in force, by file, so that a mistake does not outlive the agent that knew better."""

    path: str
    files: dict[str, list[HostAccessPolicy]]


class PolicyFiles:
    """A `Source`: a file or directory."""

    def __init__(self, path: pathlib.Path, *, state: pathlib.Path) -> None:
        """state: a file of ours for what was in force last."""
        self._path = path
        is_directory = path.is_dir()
        self._directory = path if is_directory else path.parent
        self._only = None if is_directory else path.name
        self._state = state
        # In the order in which they came: of two that cannot both be, the first stays.
        self._files: dict[str, _PolicyFile] = {}
        self._was_readable = True
        self.batch = PolicyBatch(str(path))
        """Those in force, and one sentence for each document that is not, as it stands."""

    @property
    def name(self) -> str:
        return str(self._path)

    problem = ""
    """That the directory cannot be read is told with the rest."""

    def changes(self, *, at_least_every_seconds: float) -> AsyncIterator[None]:
        return documents.changes(self._directory, at_least_every_seconds=at_least_every_seconds)

    def restore(self) -> None:
        """Take up what an earlier run saved, to be what is left of files that are wrong now."""
        saved = saved_policies.read(self._state, _SavedPolicyFiles)
        if saved is None or saved.path != str(self._path):
            return
        for name, kept in saved.files.items():
            good = saved_policies.checked(kept, source=name)
            self._files[name] = _PolicyFile(documents.NEVER_READ, good)

    def refresh(self) -> bool:
        """Read what changed since the last look; whether anything did.

        A document that stopped being right keeps its last good policy in force, with the problem
        noted. When the directory cannot be read, all stays as it is.
        """
        try:
            stamps = documents.stamps(self._directory, self._only)
        except OSError as error:
            self._was_readable = False
            problem = (
                f"{self._directory} cannot be read ({error.strerror}); policies stay as they are."
            )
            is_news = self.batch.problems != (problem,)
            self.batch = dataclasses.replace(self.batch, problems=(problem,))
            return is_news
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
        # Files that are known already first: a new one must not push them out.
        for name in sorted(to_read, key=lambda name: (name not in files, name)):
            before = files[name].policies if name in files else ()
            if stamps[name][1] > room:
                problem = effective.sentence(
                    f"{name}: all files together may have 4 MiB", uses_last_good=bool(before)
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

    def _read(self, name: str, stamp: documents.Stamp, before: tuple[Policy, ...]) -> _PolicyFile:
        try:
            found = list(_expanded(documents.read_all(self._directory / name)))
        except documents.DocumentError as error:
            return _PolicyFile(
                stamp, before, (effective.sentence(str(error), uses_last_good=bool(before)),)
            )
        good: dict[str, Policy] = {}
        refused: list[tuple[str | None, str]] = []
        for number, document in enumerate(found, start=1):
            called = api_types.name_of(document)
            where = f"{name}, document {number}" + (f" ({called!r})" if called else "")
            try:
                policy = api_types.read(document, source=f"{name}, document {number}")
                if policy.name in good:
                    raise PolicyError("the file has this policy twice; remove one of the two")
                good[policy.name] = policy
            except PolicyError as error:
                refused.append((called, f"{where}: {error}"))
        wrong = {called for called, _ in refused}
        # One without a name may be any of those that were there.
        kept = {
            policy.name: policy
            for policy in before
            if policy.name not in good and (policy.name in wrong or None in wrong)
        }
        problems = [
            effective.sentence(
                problem, uses_last_good=called in kept or (called is None and bool(kept))
            )
            for called, problem in refused
        ]
        return _PolicyFile(
            stamp, (*good.values(), *kept.values()), tuple(effective.abridged(problems, name))
        )


def _expanded(found: Iterable[object]) -> Iterable[object]:
    """Documents, and the items of lists, as kubectl writes them."""
    for document in found:
        if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
            items = document.get("items")
            yield from items if isinstance(items, list) else [document]
        else:
            yield document
