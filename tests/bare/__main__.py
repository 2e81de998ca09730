"""Runs make targets in a bare Debian: `python3 -m tests.bare 13 --times 10 --load`.

Needs root, debootstrap and this machine's kernel; nothing of the virtual environment. A minbase
root file system of Debian 12 or 13 with `make` and a clean clone of HEAD below root's home, which
is of mode 0700 there; the network, the kernel and the processors are this machine's.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from tests.bare.root import BareRootError, Root
from tests.load import busy_processors

_CHECKOUT = pathlib.Path(__file__).parents[2]
_SUITES = {"12": "bookworm", "13": "trixie"}
_USER = "newcomer"
# A run of all takes minutes on an idle machine of two processors.
_LIMIT_SECONDS = 2 * 3600


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m tests.bare", description=__doc__)
    parser.add_argument("debian", choices=_SUITES, help="release")
    parser.add_argument("--targets", default="demo test", help="make targets of each run")
    parser.add_argument("--times", type=int, default=1, help="runs one after another")
    parser.add_argument("--load", action="store_true", help="keep every processor busy meanwhile")
    parser.add_argument(
        "--user", action="store_true", help="run the targets as a user without rights"
    )
    parser.add_argument(
        "--root", type=pathlib.Path, help="a root file system to use again, made if it is not there"
    )
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("root is needed: for mounts, for chroot and by the kernel tests")
    try:
        with _root(_SUITES[arguments.debian], arguments.root) as root:
            failures = _try(root, arguments)
    except BareRootError as error:
        sys.exit(str(error))
    sys.exit(1 if failures else 0)


def _try(root: Root, arguments: argparse.Namespace) -> int:
    """Run the targets; how many runs failed."""
    failures = 0
    home = _clone(root)
    if arguments.user:
        # Its packages, which only root may install.
        root.run(["make", "-C", home, "setup"], limit_seconds=_LIMIT_SECONDS)
        home = _clone(root, _USER)
    with busy_processors() if arguments.load else contextlib.nullcontext():
        for number in range(1, arguments.times + 1):
            for target in arguments.targets.split():
                command = ["make", "-C", home, target]
                if arguments.user:
                    command = [
                        "setpriv",
                        f"--reuid={_USER}",
                        f"--regid={_USER}",
                        "--init-groups",
                        "env",
                        f"HOME=/home/{_USER}",
                        *command,
                    ]
                started = time.monotonic()
                status = root.run(command, limit_seconds=_LIMIT_SECONDS)
                failures += status != 0
                _print(
                    f"Debian {arguments.debian}, run {number} of {arguments.times}:"
                    f" make {target}: {'failed' if status else 'passed'}"
                    f" in {time.monotonic() - started:.0f} s"
                )
    return failures


@contextlib.contextmanager
def _root(suite: str, directory: pathlib.Path | None) -> Iterator[Root]:
    if directory is not None:
        yield Root.made(directory.absolute(), suite)
        return
    made = pathlib.Path(tempfile.mkdtemp(prefix="podgate-bare-", dir="/var/tmp"))
    try:
        yield Root.made(made, suite)
    finally:
        # Its mounts were in namespaces that are gone; in any case none is crossed.
        subprocess.run(["rm", "-rf", "--one-file-system", str(made)], check=False)


def _clone(root: Root, user: str = "") -> str:
    """A clean clone of HEAD in a home directory; its path inside."""
    home = f"/home/{user}" if user else "/root"
    if user and not root.path(home).exists():
        root.run(["useradd", "--create-home", user], is_checked=True)
    path = f"{home}/podgate"
    shutil.rmtree(root.path(path), ignore_errors=True)
    subprocess.run(
        ["git", "clone", "--quiet", "--no-local", str(_CHECKOUT), str(root.path(path))], check=True
    )
    if user:
        root.run(["chown", "-R", f"{user}:{user}", path], is_checked=True)
    return path


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
