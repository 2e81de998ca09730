"""A bare Debian's root file system, and commands inside it with this machine's kernel."""

import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

from tests.bare import machine
from tests.kernels import suites

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_MADE = ".made"

# Mounts of a namespace of its own, which are gone with the last process in it. pivot_root and not
# chroot: tests change how mounts of "/" propagate, so it has to be a mount. `$1` is the directory,
# then pairs of a path outside and one inside, then "--" and the command.
_ENTER = """
set -e
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t bpf bpf "$root/sys/fs/bpf"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do
    mkdir -p "$root$1"
    mount --bind -o ro "$1" "$root$1"
    shift
done
shift
cd "$root"
pivot_root . .
umount -l .
cd /
exec "$@"
"""


class BareRootError(Exception):
    """There is no such root file system; the message is one sentence."""


class Root:
    """One directory with a Debian in it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._setup = machine.Setup.read()

    @classmethod
    def made(cls, directory: pathlib.Path, suite: str) -> "Root":
        """A root file system of the suite, created unless it exists. Raises `BareRootError`."""
        made = cls(directory)
        if not made.path(_MADE).exists():
            made._make(suite)
            made.path(_MADE).touch()
        return made

    def path(self, inside: str) -> pathlib.Path:
        return self._directory / inside.lstrip("/")

    def run(
        self, command: Sequence[str], *, limit_seconds: float = 600, is_checked: bool = False
    ) -> int:
        """Run a command as root in it, with its output on this process's; the exit status.

        is_checked: raise `BareRootError` for another status than 0.
        """
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive",
            "TERM": os.environ.get("TERM", "dumb"),
            **self._setup.environment,
        }
        entering = ["sh", "-c", _ENTER, "sh", str(self._directory), *self._setup.directories, "--"]
        done = subprocess.run(
            ["unshare", "--mount", *entering, *command],
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=limit_seconds,
        )
        if is_checked and done.returncode != 0:
            raise BareRootError(f"{command[0]} failed inside {self._directory}")
        return done.returncode

    def _make(self, suite: str) -> None:
        if shutil.which("debootstrap") is None:
            raise BareRootError("debootstrap is missing; run 'apt-get install debootstrap'")
        mirrors = suites.of_machine()
        if mirrors.archive is None:
            raise BareRootError("this machine's apt names no mirror of Debian")
        self._directory.mkdir(parents=True, exist_ok=True)
        # debootstrap mounts, too.
        command = ["debootstrap", "--variant=minbase", suite, str(self._directory), mirrors.archive]
        done = subprocess.run(
            ["unshare", "--mount", *command], check=False, stdout=subprocess.DEVNULL
        )
        if done.returncode != 0:
            raise BareRootError(f"debootstrap of {suite} failed")
        self._set_up(suite, mirrors.archive, mirrors.security)
        self.run(["apt-get", "update", "-qq"], is_checked=True)
        self.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "make"], is_checked=True
        )

    def _set_up(self, suite: str, archive: str, security: str | None) -> None:
        sources = [(archive, f"{suite} {suite}-updates")]
        if security:
            sources.append((security, f"{suite}-security"))
        self.path("/etc/apt/sources.list").unlink(missing_ok=True)
        self.path("/etc/apt/sources.list.d/machine.sources").write_text(
            "\n".join(
                f"Types: deb\nURIs: {uri}\nSuites: {names}\nComponents: main\n"
                f"Signed-By: {_KEYRING}\n"
                for uri, names in sources
            )
        )
        self.path("/etc/apt/apt.conf.d/90machine").write_text(machine.apt_settings())
        # No package starts a service: those would be the machine's own processes.
        policy = self.path("/usr/sbin/policy-rc.d")
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        for file in self._setup.files:
            copy = self.path(f"{machine.COPIES}{file}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        for file in ("/etc/resolv.conf", "/etc/hosts"):
            shutil.copy(file, self.path(file))
