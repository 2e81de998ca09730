"""Packages that tests need and the machine lacks, for its guests: they use the machine's files, and
what is installed there stays as it is.
"""

import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence

NONE = bytes(10240)
"""A tar without a file."""

_INSTALL = ("apt-get", "install", "--simulate", "--no-upgrade", "--no-install-recommends")


def archive(packages: Sequence[str], folder: pathlib.Path) -> bytes:
    """A tar of the packages and what they need, as far as it is not installed; maybe an empty one.

    folder: keeps the downloads. Raises `subprocess.CalledProcessError` if apt has no such package.
    """
    names = to_install(_run(*_INSTALL, *packages))
    root = folder / "_".join(names)
    if names and not (root / ".complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        (root / "files").mkdir(parents=True)
        # Else apt warns that its user cannot write below a checkout of root's.
        _run("apt-get", "download", "-qq", "--option=APT::Sandbox::User=root", *names, cwd=root)
        for package in sorted(root.glob("*.deb")):
            _run("dpkg-deb", "--extract", str(package), str(root / "files"))
        (root / ".complete").touch()
    (root / "files").mkdir(parents=True, exist_ok=True)
    tar = ["tar", "-C", str(root / "files"), "-c", "."]
    return subprocess.run(tar, check=True, capture_output=True).stdout


def to_install(simulated: str) -> list[str]:
    """The packages in the output of `apt-get install --simulate`."""
    return re.findall(r"^Inst (\S+)", simulated, re.MULTILINE)


def _run(*command: str, cwd: pathlib.Path | None = None) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd)
    return done.stdout
