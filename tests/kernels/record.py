"""Which test files ran to their end on one kernel, and with what results, in a file of the
repository: a run that takes hours continues on any machine.
"""

import datetime
import pathlib

import msgspec

from tests.kernels import results

_DIRECTORY = pathlib.Path(__file__).parent / "recorded"


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last run of a test file to its end."""

    commit: str
    passed: int
    lacks: dict[str, int] = {}
    """By missing feature, how many tests found it missing."""
    failed: dict[str, str] = {}
    """Names to reasons."""

    @property
    def lacking(self) -> int:
        return sum(self.lacks.values())

    @property
    def tests(self) -> int:
        return self.passed + self.lacking + len(self.failed)


class Record(msgspec.Struct, frozen=True):
    """All files of a kernel; release, package, attachment and date (UTC) are those of its last
    run."""

    release: str = "unknown"
    package: str = "unknown"
    attachment: str = "unknown"
    files: dict[str, FileRecord] = {}
    date: str = ""

    def updated(self, found: results.Results) -> "Record":
        """With the files that ran to their end since, in place of their former runs."""
        if not found.complete:
            return self
        files = self.files | {name: _file_record(found.files[name]) for name in found.complete}
        return Record(
            *(found.release, found.package, found.attachment, dict(sorted(files.items()))),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )


def read(title: str, directory: pathlib.Path = _DIRECTORY) -> Record:
    """The record of a kernel, by the title of its runs; an empty one if there is none.

    msgspec.ValidationError: the file is no record.
    """
    path = _path(title, directory)
    return msgspec.json.decode(path.read_bytes(), type=Record) if path.exists() else Record()


def write(title: str, record: Record, directory: pathlib.Path = _DIRECTORY) -> None:
    directory.mkdir(exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(record), indent=2)
    _path(title, directory).write_bytes(encoded + b"\n")


def _path(title: str, directory: pathlib.Path) -> pathlib.Path:
    return directory / f"{title.replace(' ', '-')}.json"


def _file_record(file: results.FileResults) -> FileRecord:
    lacks: dict[str, int] = {}
    for feature in sorted(file.not_offered.values()):
        lacks[feature] = lacks.get(feature, 0) + 1
    failed = {test: results.shortened(reason) for test, reason in sorted(file.failed.items())}
    return FileRecord(file.commit, len(file.passed), lacks, failed)
