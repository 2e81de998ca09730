"""Policies from a file or a directory of files, several a file, followed while it changes."""

import dataclasses
import pathlib
from collections.abc import Iterable

import msgspec
import structlog

from agent import documents, statefiles
from agent.rules import policies
from agent.rules.policies import HostAccessPolicy, Policy, PolicyError

log = structlog.get_logger(__name__)

# All files together. A policy has some 300 bytes, so this is more than may be in force.
_MAX_TOTAL_BYTES = 4 * documents.MAX_BYTES
# A file that is something else altogether may be wrong in thousands of places.
_MOST_PROBLEMS = 20
_LONGEST_PROBLEM = 500


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """What is known of one file. problems: one sentence each; fits: there was room for it."""

    stamp: documents.Stamp
    policies: tuple[Policy, ...]
    problems: tuple[str, ...] = ()
    fits: bool = True


class _Saved(msgspec.Struct):
    """What was in force, by file, so that a mistake does not outlive the agent that knew better."""

    path: str
    files: dict[str, list[HostAccessPolicy]]


class PolicySource:
    """What is in force of a file or directory. Its methods block: call them beside the loop."""

    def __init__(self, path: pathlib.Path, *, state: pathlib.Path) -> None:
        """state: a file of ours for what was in force last."""
        self._path = path
        is_directory = path.is_dir()
        self.directory = path if is_directory else path.parent
        """Where changes happen."""
        self._only = None if is_directory else path.name
        self._state = state
        # In the order in which they came: of two that cannot both be, the first stays.
        self._files: dict[str, _File] = {}
        self._was_readable = True
        self.policies: tuple[Policy, ...] = ()
        """Those in force, in the order of their names."""
        self.problems: tuple[str, ...] = ()
        """One sentence for each document that is not in force as it stands."""

    def restore(self) -> None:
        """Take up what an earlier run saved, to be what is left of files that are wrong now."""
        try:
            saved = msgspec.json.decode(self._state.read_bytes(), type=_Saved)
            if saved.path != str(self._path):
                return
            for name, kept in saved.files.items():
                good = tuple(policies.check(document, source=name) for document in kept)
                self._files[name] = _File(documents.NEVER_READ, good)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, PolicyError) as error:
            log.warning("policies of an earlier run cannot be read", error=str(error))

    def look(self) -> bool:
        """Read what changed since the last look; whether anything did.

        A document that stopped being right keeps its last good policy in force, with the problem
        noted. When the directory cannot be read, all stays as it is.
        """
        try:
            stamps = documents.stamps(self.directory, self._only)
        except OSError as error:
            self._was_readable = False
            return self._tell(
                (f"{self.directory} cannot be read ({error.strerror}); policies stay as they are.",)
            )
        files = {name: file for name, file in self._files.items() if name in stamps}
        settled = {name for name, file in files.items() if file.stamp == stamps[name] and file.fits}
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
                problem = _sentence(f"{name}: all files together may have 4 MiB", bool(before))
                files[name] = _File(stamps[name], before, (problem,), fits=False)
            else:
                room -= stamps[name][1]
                files[name] = self._read(name, stamps[name], before)
        self._files = files
        self._put_in_force()
        self._save()
        return True

    def _read(self, name: str, stamp: documents.Stamp, before: tuple[Policy, ...]) -> _File:
        try:
            found = list(_unfolded(documents.read_all(self.directory / name)))
        except documents.DocumentError as error:
            return _File(stamp, before, (_sentence(str(error), bool(before)),))
        good: dict[str, Policy] = {}
        refused: list[tuple[str | None, str]] = []
        for number, document in enumerate(found, start=1):
            called = policies.name_of(document)
            where = f"{name}, document {number}" + (f" ({called!r})" if called else "")
            try:
                policy = policies.read(document, source=f"{name}, document {number}")
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
            _sentence(problem, called in kept or (called is None and bool(kept)))
            for called, problem in refused
        ]
        return _File(stamp, (*good.values(), *kept.values()), tuple(_abridged(problems, name)))

    def _put_in_force(self) -> None:
        active: dict[str, Policy] = {}
        problems: list[str] = []
        too_many = 0
        for name, file in self._files.items():
            twins: list[str] = []
            for policy in file.policies:
                if twin := active.get(policy.name):
                    twins.append(
                        f"{policy.source} describes policy {policy.name}, which {twin.source} "
                        "describes already; remove one of the two."
                    )
                elif len(active) == policies.MOST_POLICIES:
                    too_many += 1
                else:
                    active[policy.name] = policy
            problems += [*file.problems, *_abridged(twins, name)]
        if too_many:
            problems.append(
                f"{self._path} holds {too_many} policies more than the {policies.MOST_POLICIES:,} "
                "that can be in force; those that came last are left out."
            )
        self.policies = tuple(active[name] for name in sorted(active))
        self._tell(tuple(problems))

    def _tell(self, problems: tuple[str, ...]) -> bool:
        """Log what is new; whether anything is."""
        for problem in problems:
            if problem not in self.problems:
                log.warning("policy problem", problem=problem)
        is_news = problems != self.problems
        self.problems = problems
        return is_news

    def _save(self) -> None:
        content = _Saved(
            str(self._path),
            {name: [one.document for one in file.policies] for name, file in self._files.items()},
        )
        try:
            statefiles.replace(self._state, msgspec.json.encode(content))
        except OSError as error:
            log.warning("policies cannot be saved", error=str(error))


def _unfolded(found: Iterable[object]) -> Iterable[object]:
    """Documents, and the items of lists, as kubectl writes them."""
    for document in found:
        if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
            items = document.get("items")
            yield from items if isinstance(items, list) else [document]
        else:
            yield document


def _sentence(problem: str, is_kept: bool) -> str:
    ending = " The last good one stays in force." if is_kept else ""
    return f"{problem[:_LONGEST_PROBLEM]}.{ending}"


def _abridged(problems: list[str], name: str) -> list[str]:
    if len(problems) <= _MOST_PROBLEMS:
        return problems
    more = len(problems) - _MOST_PROBLEMS
    return [*problems[:_MOST_PROBLEMS], f"{name} has {more:,} problems more like these."]
