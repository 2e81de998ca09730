"""Debian's kernels, from the mirror that this machine uses, without touching its apt.

Each suite gets a configuration, lists and a cache of its own below `.cache/kernels`, so that
bullseye's and trixie's packages are never seen by the machine's own apt, and a suite that cannot be
had spoils no other.
"""

import dataclasses
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# The full image: the cloud one lacks 9p, by which the guest sees the host's files.
_META_PACKAGE = "linux-image-amd64"
_CODENAMES = {"bullseye", "bookworm", "trixie", "forky", "stable", "oldstable", "testing", "sid"}


class NotToBeHadError(Exception):
    """No suite has the kernel, or no mirror is known: noted in the report, no failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel series. The first of `suites` that has it is used."""

    series: str
    suites: tuple[str, ...]


KERNELS = (
    Kernel("5.10", ("bullseye-security", "bullseye")),
    Kernel("6.1", ("bookworm-security", "bookworm")),
    Kernel("6.12", ("trixie-security", "trixie", "bookworm-backports")),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """An extracted kernel package. `package_version` is Debian's, as in "6.1.192-2"."""

    vmlinuz: pathlib.Path
    modules: pathlib.Path
    """The folder named as the kernel's release, with modules.dep in it."""
    package_version: str
    suite: str

    @property
    def release(self) -> str:
        """The output of `uname -r`, as in "6.1.0-56-amd64"."""
        return self.modules.name


@dataclasses.dataclass(frozen=True, slots=True)
class Mirrors:
    """Where packages come from; None where the machine has no such source."""

    archive: str | None
    security: str | None

    def of(self, suite: str) -> str | None:
        return self.security if suite.endswith("-security") else self.archive


def read_mirrors(texts: Iterable[str]) -> Mirrors:
    """The machine's own mirrors, out of its sources' texts in either of apt's two formats."""
    archive, security = None, None
    for uri, suites in _sources(texts):
        names = {suite.split("-")[0].split("/")[0] for suite in suites}
        if not names <= _CODENAMES:
            continue
        if all(re.search(r"[-/](security|updates)$", suite) for suite in suites) and any(
            "security" in part for part in (uri, *suites)
        ):
            security = security or uri
        else:
            archive = archive or uri
    return Mirrors(archive, security)


def fetch(kernel: Kernel, mirrors: Mirrors, cache: pathlib.Path) -> Image:
    """The newest image of the series, downloaded and extracted below `cache` unless it exists.

    Raises `NotToBeHadError` with the last suite's reason.
    """
    reasons = []
    for suite in kernel.suites:
        uri = mirrors.of(suite)
        if uri is None:
            reasons.append(f"{suite}: this machine's apt names no mirror for it")
            continue
        apt = _Apt(suite, uri, cache / "apt" / suite)
        try:
            apt.update()
            package, version = apt.newest(kernel.series)
            return _extracted(apt, package, version, cache / "images" / kernel.series)
        except NotToBeHadError as error:
            reasons.append(f"{suite}: {error}")
    raise NotToBeHadError("; ".join(reasons))


class _Apt:
    """apt-get and apt-cache over one suite alone."""

    def __init__(self, suite: str, uri: str, folder: pathlib.Path) -> None:
        self.suite = suite
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        source = folder / "suite.sources"
        source.write_text(
            f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\n"
            f"Architectures: amd64\nSigned-By: {_KEYRING}\n",
            encoding="ascii",
        )
        options = {
            "Dir::Etc::SourceList": source,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "Dir::State::Lists": folder / "lists",
            "Dir::State::Status": "/dev/null",
            "Dir::Cache": folder / "cache",
            # Else apt warns that its user cannot write below a checkout of root's.
            "APT::Sandbox::User": "root",
        }
        self._options = [f"--option={name}={value}" for name, value in options.items()]

    def update(self) -> None:
        self._run("apt-get", "update", "-qq", "--error-on=any")

    def newest(self, series: str) -> tuple[str, str]:
        """The real package behind the newest meta package of the series, and its version."""
        found = None
        for record in self._run("apt-cache", "show", _META_PACKAGE).split("\n\n"):
            version = re.search(r"^Version: (\S+)", record, re.MULTILINE)
            package = re.search(r"^Depends: (linux-image-\S+)", record, re.MULTILINE)
            if version and package and version[1].startswith(f"{series}."):
                # apt shows the newest version first.
                found = found or (package[1], version[1])
        if found is None:
            raise NotToBeHadError(f"no {_META_PACKAGE} of {series}")
        return found

    def download(self, package: str, into: pathlib.Path) -> pathlib.Path:
        self._run("apt-get", "download", "-qq", package, cwd=into)
        (path,) = into.glob(f"{package}_*.deb")
        return path

    def _run(self, *command: str, cwd: pathlib.Path | None = None) -> str:
        done = subprocess.run(
            [command[0], *self._options, *command[1:]], capture_output=True, text=True, cwd=cwd
        )
        if done.returncode != 0:
            raise NotToBeHadError(_reason(done.stderr))
        return done.stdout


def _extracted(apt: _Apt, package: str, version: str, folder: pathlib.Path) -> Image:
    root = folder / f"{package}_{version}"
    if not (root / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        root.mkdir(parents=True)
        archive = apt.download(package, folder)
        subprocess.run(["dpkg-deb", "--extract", archive, root], check=True)
        archive.unlink()
        if not (root / "lib").exists():  # Debian 13 ships /usr/lib/modules
            (root / "lib").symlink_to("usr/lib")
        release = next((root / "lib/modules").iterdir()).name
        subprocess.run(["depmod", "--basedir", root, release], check=True)
        (root / ".complete").touch()
    (vmlinuz,) = (root / "boot").glob("vmlinuz-*")
    (modules,) = (root / "lib/modules").iterdir()
    return Image(vmlinuz, modules.resolve(), version, apt.suite)


def _reason(messages: str) -> str:
    """apt's first error without addresses: reports name no mirror."""
    lines = [line for line in messages.splitlines() if line.startswith("E:")]
    return re.sub(r"\w+://\S+ ?", "", lines[0][2:].strip()) if lines else "apt failed"


def _sources(texts: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Addresses with their suites, of the binary packages with a component "main"."""
    for text in texts:
        for stanza in re.split(r"\n\s*\n", text):
            lines = [line for line in stanza.splitlines() if not line.startswith("#")]
            fields = dict(re.findall(r"^(\w[\w-]*):[ \t]*(.+)$", "\n".join(lines), re.MULTILINE))
            if (
                "main" in fields.get("Components", "").split()
                and "deb" in fields.get("Types", "").split()
            ):
                for uri in fields["URIs"].split():
                    yield uri, fields["Suites"].split()
            for line in lines:
                entry = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
                if entry and "main" in entry[3].split():
                    yield entry[1], [entry[2]]


def _has(fields: dict[str, str], name: str, word: str) -> bool:
    return word in fields.get(name, "").split()
