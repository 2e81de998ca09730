"""`python -m tests.kernels [SERIES] [--files FILE...]`: the kernel tests on Debian's kernels, or
some files of them, and docs/kernels.md.

Exit status 1 when a test failed or a guest did not finish; a kernel that is not available is noted
on the page and is no failure.
"""

import argparse
import fcntl
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from tests.kernels import guests, report, results, suites

_CHECKOUT = pathlib.Path(__file__).parents[2]
_CACHE = _CHECKOUT / ".cache" / "kernels"
_PAGE = _CHECKOUT / "docs" / "kernels.md"
_PACKAGES = ("qemu-system-x86", "busybox-static", "kmod", "debian-archive-keyring")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument("series", nargs="?", choices=[kernel.series for kernel in suites.KERNELS])
    parser.add_argument("--files", nargs="+", default=[], help="default: all of tests/kernel")
    parser.add_argument("--only", default="", help="pytest -k; writes no page")
    parser.add_argument(
        "--systemd", action="store_true", help="systemd is the guest's init; a row of its own"
    )
    # The suite takes most of an hour in software emulation; more, for a busy host.
    parser.add_argument("--minutes", type=float, default=120, help="the limit for each kernel")
    options = parser.parse_args()
    for file in options.files:
        if not (_CHECKOUT / file).is_file():
            parser.error(f"there is no {file}; name files as from {_CHECKOUT}")

    _install()
    _CACHE.mkdir(parents=True, exist_ok=True)
    (_CACHE / ".gitignore").write_text("*\n")
    mirrors = suites.read_mirrors(_apt_sources())
    failed = False
    for kernel in suites.KERNELS:
        if options.series in (None, kernel.series):
            title = report.title(kernel.series, options.files, has_systemd=options.systemd)
            arguments = [*options.files, *(["-k", options.only] if options.only else [])]
            entry, is_good = _try(
                kernel,
                title,
                mirrors,
                arguments,
                options.minutes * 60,
                has_systemd=options.systemd,
            )
            failed |= not is_good
            _print(entry.row)
            if not options.only:
                _write(title, entry)
    return int(failed)


def _write(title: str, entry: report.Entry) -> None:
    protocols = _CACHE / "protocols"
    protocols.mkdir(exist_ok=True)
    (protocols / f"{title}.md").write_text(entry.protocol, encoding="utf-8")
    with (_CACHE / "page.lock").open("w") as lock:  # runs of other kernels may write, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = report.read(_PAGE.read_text(encoding="utf-8") if _PAGE.exists() else "")
        _PAGE.write_text(report.render(rows | {title: entry.row}), encoding="utf-8")


def _try(
    kernel: suites.Kernel,
    title: str,
    mirrors: suites.Mirrors,
    arguments: list[str],
    limit_seconds: float,
    *,
    has_systemd: bool,
) -> tuple[report.Entry, bool]:
    try:
        image = suites.fetch(kernel, mirrors, _CACHE)
    except suites.NotToBeHadError as error:
        return report.entry_not_to_be_had(title, str(error)), True
    exchange = _CACHE / "exchange" / kernel.series
    _print(f"{image.release}: running; follow it in {exchange.relative_to(_CHECKOUT)}/output.txt")
    commit = _commit()
    ran = guests.run(image, _CHECKOUT, exchange, arguments, limit_seconds, has_systemd=has_systemd)
    found = results.read(exchange)
    remark = ""
    if not ran.ended_in_time:
        remark = f"The guest was stopped after {limit_seconds / 60:.0f} minutes."
    elif not (exchange / "status").exists():
        remark = "The guest ended before the suite did."
    elif not found.collected:
        remark = f"No test was collected; see {exchange.relative_to(_CHECKOUT)}."
    entry = report.entry_of_run(
        title=title,
        release=image.release,
        package=f"{image.package_version} ({image.suite})",
        commit=commit,
        seconds=ran.seconds,
        found=found,
        remark=remark,
    )
    return entry, found.is_complete and not found.failed


def _apt_sources() -> Iterator[str]:
    apt = pathlib.Path("/etc/apt")
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if path.suffix in (".list", ".sources") and path.exists():
            yield path.read_text(encoding="utf-8")


def _install() -> None:
    """Install missing packages from the distribution, as deploy/setup.sh does."""
    missing = [package for package in _PACKAGES if not _is_installed(package)]
    if not missing:
        return
    _print(f"installing {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
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
        [*git, "status", "--porcelain", "--", ".", ":!docs/kernels.md"],
        check=True,
        capture_output=True,
    ).stdout
    return f"{name} and changes" if changes else name


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
