"""apt over some suites alone, for one architecture, without touching the machine's own apt."""

import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class NotToBeHadError(Exception):
    """No suite has the package, or no mirror is known: noted in the report, no failure."""


class Apt:
    """apt-get and apt-cache with a configuration, lists and a cache of their own."""

    def __init__(self, suites: Mapping[str, str], architecture: str, folder: pathlib.Path) -> None:
        """suites: to the address of each; architecture: Debian's name; folder: of the cache."""
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._archives = folder / "cache" / "archives"
        sources = folder / "suites.sources"
        sources.write_text(
            "\n".join(
                f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\n"
                f"Architectures: {architecture}\nSigned-By: {_KEYRING}\n"
                for suite, uri in suites.items()
            ),
            encoding="ascii",
        )
        options = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "Dir::Etc::SourceList": sources,
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

    def show(self, package: str) -> str:
        """All versions of a package, the newest first."""
        return self._run("apt-cache", "show", package)

    def download(self, package: str, into: pathlib.Path) -> pathlib.Path:
        """One package alone."""
        self._run("apt-get", "download", "-qq", package, cwd=into)
        (path,) = into.glob(f"{package}_*.deb")
        return path

    def download_all(self, packages: Sequence[str]) -> list[pathlib.Path]:
        """The packages and all that they need, as on a machine without any."""
        self._run("apt-get", "clean")
        install = ("install", "--download-only", "-y", "-qq", "--no-install-recommends")
        self._run("apt-get", *install, *packages)
        return sorted(self._archives.glob("*.deb"))

    def _run(self, *command: str, cwd: pathlib.Path | None = None) -> str:
        done = subprocess.run(
            [command[0], *self._options, *command[1:]], capture_output=True, text=True, cwd=cwd
        )
        if done.returncode != 0:
            raise NotToBeHadError(_reason(done.stderr))
        return done.stdout


def _reason(messages: str) -> str:
    """apt's first error without addresses: reports name no mirror."""
    lines = [line for line in messages.splitlines() if line.startswith("E:")]
    return re.sub(r"\w+://\S+ ?", "", lines[0][2:].strip()) if lines else "apt failed"
