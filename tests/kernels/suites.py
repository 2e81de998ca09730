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

from tests.kernels.apt import Apt, NotToBeHadError

CACHE = pathlib.Path(__file__).parents[2] / ".cache" / "kernels"
# The full image: the cloud one lacks 9p, by which the guest sees the host's files.
_META_PACKAGE = "linux-image-{}"
_CODENAMES = {"bullseye", "bookworm", "trixie", "forky", "stable", "oldstable", "testing", "sid"}


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


def make_cache() -> None:
    """The folder that git ignores."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")


def of_machine() -> Mirrors:
    """Those that this machine's apt has."""
    apt = pathlib.Path("/etc/apt")
    paths = (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*")))
    used = (path for path in paths if path.suffix in (".list", ".sources") and path.exists())
    return read_mirrors(path.read_text(encoding="utf-8") for path in used)


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


def fetch(kernel: Kernel, mirrors: Mirrors, cache: pathlib.Path, architecture: str) -> Image:
    """The newest image of the series, downloaded and extracted below `cache` unless it exists.

    architecture: Debian's name. Raises `NotToBeHadError` with the last suite's reason.
    """
    meta_package = _META_PACKAGE.format(architecture)
    reasons = []
    for suite in kernel.suites:
        uri = mirrors.of(suite)
        if uri is None:
            reasons.append(f"{suite}: this machine's apt names no mirror for it")
            continue
        apt = Apt({suite: uri}, architecture, cache / "apt" / f"{suite}-{architecture}")
        try:
            apt.update()
            package, version = _newest(apt.show(meta_package), kernel.series)
            folder = cache / "images" / f"{kernel.series}-{architecture}"
            return _extracted(apt, package, version, folder, suite)
        except NotToBeHadError as error:
            reasons.append(f"{suite}: {error}")
    raise NotToBeHadError("; ".join(reasons))


def _newest(meta_packages: str, series: str) -> tuple[str, str]:
    """The real package behind the newest meta package of the series, and its version.

    meta_packages: the output of `apt-cache show`, which has the newest version first.
    """
    for record in meta_packages.split("\n\n"):
        version = re.search(r"^Version: (\S+)", record, re.MULTILINE)
        package = re.search(r"^Depends: (linux-image-\S+)", record, re.MULTILINE)
        if version and package and version[1].startswith(f"{series}."):
            return package[1], version[1]
    raise NotToBeHadError(f"no kernel of {series}")


def _extracted(apt: Apt, package: str, version: str, folder: pathlib.Path, suite: str) -> Image:
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
    return Image(vmlinuz, modules.resolve(), version, suite)


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
