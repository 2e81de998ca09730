"""`python -m tests.kernels [SERIES] [--files FILE...]`: the kernel tests on Debian's kernels, or
some files of them, into tests/kernels/recorded and docs/internals/kernel-runs.md.

Exit status 1 when a test failed or a guest did not finish; a kernel that is not available is noted
on the page and is no failure.
"""

import argparse
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

from tests.kernels import foreign, guests, record, report, results, suites
from tests.kernels.apt import NotToBeHadError
from tests.kernels.architectures import ARCHITECTURES, Architecture

_CHECKOUT = pathlib.Path(__file__).parents[2]
_CACHE = suites.CACHE
_PAGE = _CHECKOUT / "docs" / "internals" / "kernel-runs.md"
_PACKAGES = ("busybox-static", "kmod", "debian-archive-keyring")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument("series", nargs="?", choices=[kernel.series for kernel in suites.KERNELS])
    parser.add_argument("--files", nargs="+", default=[], help="in this order; default: all")
    parser.add_argument(
        "--systemd", action="store_true", help="systemd is the guest's init; a section of its own"
    )
    parser.add_argument(
        "--resume", action="store_true", help="only files that did not run to their end before"
    )
    parser.add_argument("--minutes", type=float, default=360, help="the limit for each kernel")
    parser.add_argument(
        "--results", type=pathlib.Path, default=_CACHE / "exchange", help="a directory"
    )
    parser.add_argument(
        "--architecture",
        choices=ARCHITECTURES,
        default="amd64",
        help="of the guest; a section of its own",
    )
    parser.add_argument(
        "--emulator", default="", help="QEMU 10 takes three quarters of the time of 7.2"
    )
    options = parser.parse_args()
    offered = _test_files()
    if unknown := set(options.files) - set(offered):
        parser.error(f"no kernel tests in {', '.join(sorted(unknown))}; name files as pytest does")

    # As Ctrl-C: the guest ends with its run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    architecture = ARCHITECTURES[options.architecture]
    _install(architecture.package, *_PACKAGES)
    suites.make_cache()
    mirrors = suites.of_machine()
    failed = False
    for kernel in suites.KERNELS:
        if options.series in (None, kernel.series):
            title = report.title(kernel.series, architecture.name, has_systemd=options.systemd)
            exchange = options.results.resolve() / title.replace(" ", "-")
            # A run that was stopped has recorded nothing yet.
            kept = record.read(title).updated(results.read(exchange))
            done = kept.files if options.resume else {}
            files = [file for file in options.files or offered if file not in done]
            try:
                if files:
                    _run(
                        kernel,
                        mirrors,
                        exchange,
                        files,
                        options.minutes * 60,
                        architecture=architecture,
                        has_systemd=options.systemd,
                        emulator=options.emulator,
                    )
            except NotToBeHadError as error:
                _print(f"{kernel.series}: not available: {error}")
                continue
            found = results.read(exchange)
            failed |= not found.complete.issuperset(files) or any(
                found.files[file].failed for file in files
            )
            _write(title, found, kept.updated(found), offered)
    return int(failed)


def _test_files() -> list[str]:
    """Files with kernel tests, as `make test-kernel` takes them, and last those that load modules.
    Those of a container runtime are left out, because its responses are the same on every kernel.
    """
    apart = ("runtime", "cluster", "image", "page")
    collect = [sys.executable, "-m", "pytest", "-m", "kernel", "--collect-only", "-q"]
    collected = subprocess.run(
        [*collect, *(f"--ignore=tests/{name}" for name in apart)],
        cwd=_CHECKOUT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    tests = (line for line in collected.splitlines() if "::" in line)
    files = dict.fromkeys(results.file_of(test) for test in tests)
    return sorted(files, key=lambda file: file.startswith("tests/kernel/devices/"))


def _run(
    kernel: suites.Kernel,
    mirrors: suites.Mirrors,
    exchange: pathlib.Path,
    files: list[str],
    limit_seconds: float,
    *,
    architecture: Architecture,
    has_systemd: bool,
    emulator: str,
) -> None:
    image = suites.fetch(kernel, mirrors, _CACHE, architecture.name)
    if architecture.name == "amd64":
        files_of_guest = guests.Files.of_host(_CACHE)
    else:
        files_of_guest = foreign.files(architecture, mirrors, _CACHE, _CHECKOUT)
        image = foreign.with_modules(files_of_guest.root, image)
    _print(f"{image.release}: {len(files)} files; follow them in {exchange}/output.txt")
    ran = guests.run(
        image,
        _CHECKOUT,
        _commit(),
        exchange,
        files,
        limit_seconds,
        files=files_of_guest,
        has_systemd=has_systemd,
        emulator=emulator,
    )
    if not ran.ended_in_time:
        _print(f"{image.release}: stopped after {limit_seconds / 60:.0f} minutes")
    elif not (exchange / "status").exists():
        _print(f"{image.release}: the guest ended before the tests did; see {exchange}/console.txt")


def _write(title: str, found: results.Results, kept: record.Record, offered: Sequence[str]) -> None:
    record.write(title, kept)
    protocols = _CACHE / "protocols"
    protocols.mkdir(exist_ok=True)
    (protocols / f"{title}.md").write_text(report.protocol(title, found), encoding="utf-8")
    with (_CACHE / "page.lock").open("w") as lock:  # runs of other kernels may write, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        sections = report.read(_PAGE.read_text(encoding="utf-8") if _PAGE.exists() else "")
        sections[title] = report.section(title, kept, offered)
        _PAGE.write_text(report.render(sections), encoding="utf-8")


def _install(*packages: str) -> None:
    """Install missing packages from the distribution, as deploy/setup.sh does."""
    missing = [package for package in packages if not _is_installed(package)]
    if not missing:
        return
    _print(f"installing {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Runs of several kernels may start at once.
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    install += ["--option=DPkg::Lock::Timeout=600"]
    if subprocess.run(install, env=environment, capture_output=True).returncode != 0:
        # The package lists may be missing or old: fetch them only if it does not work without.
        subprocess.run(["apt-get", "update", "-qq"], env=environment, check=True)
        subprocess.run(install, env=environment, check=True, stdout=subprocess.DEVNULL)


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${Status}", package]
    return subprocess.run(query, capture_output=True).stdout.endswith(b" installed")


def _commit() -> str:
    git = ["git", "-C", str(_CHECKOUT)]
    name = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    changes = subprocess.run(
        [*git, "status", "--porcelain", "--", ".", f":!{_PAGE.relative_to(_CHECKOUT)}"],
        check=True,
        capture_output=True,
    ).stdout
    return f"{name} and changes" if changes else name


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
