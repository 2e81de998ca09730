"""A machine emulated in software that boots one kernel and runs the suite on it."""

import dataclasses
import fnmatch
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time

from tests.kernel.devices import requirements
from tests.kernels import initramfs, packages, suites
from tests.kernels.architectures import ARCHITECTURES, Architecture

_HERE = pathlib.Path(__file__).parent
# Two workers, each with agents and pods; the files that tests write are in memory too.
_MEMORY_MB = 4096
# Retpolines and the like make emulation slow, and so does clearing of pages that are written.
_KERNEL_OPTIONS = "loglevel=7 panic=-1 mitigations=off init_on_alloc=0"
# What no kernel test imports, half of all files; the guest has them by the host's.
_TOOLS = (
    *("clang_format", "config-3.*", "grimp", "lib2to3", "mypy", "mypyc", "*__mypyc.*.so"),
    *("pip", "setuptools", "sqlalchemy", "cel_expr_python", "tzdata"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """What a guest sees as its files: this machine's, or those of `foreign`."""

    architecture: Architecture
    root: pathlib.Path
    python: tuple[pathlib.Path, ...]
    """Directories below the root with Python's modules."""
    packages: bytes
    """A tar of what the tests need in addition."""
    busybox: pathlib.Path | None = None
    """The guest's, if it is not this machine's."""

    @classmethod
    def of_host(cls, cache: pathlib.Path) -> "Files":
        """This machine's. cache: of downloads."""
        python = tuple(pathlib.Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib"))
        added = packages.archive(requirements.PACKAGES, cache / "packages")
        return cls(ARCHITECTURES["amd64"], pathlib.Path("/"), python, added)

    def inside(self, path: pathlib.Path) -> str:
        """The guest's path of a file."""
        return f"/{path.relative_to(self.root)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What came out of a guest; all files lie in `exchange`, with its console in console.txt."""

    exchange: pathlib.Path
    seconds: float
    ended_in_time: bool


def run(
    image: suites.Image,
    checkout: pathlib.Path,
    commit: str,
    exchange: pathlib.Path,
    arguments: list[str],
    limit_seconds: float,
    *,
    files: Files,
    has_systemd: bool = False,
    emulator: str = "",
) -> Run:
    """Boot, run `pytest -m kernel` with more `arguments`, and switch off.

    checkout: a clean copy is made of what git knows or would add there. exchange: a folder that is
    emptied first but for the results; the only one that the guest can write to. has_systemd:
    whether systemd is the guest's init, as on a node. emulator: another command than the
    architecture's.
    """
    exchange.mkdir(parents=True, exist_ok=True)
    for path in exchange.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "results.jsonl":
            path.unlink()
    with (exchange / "results.jsonl").open("a", encoding="utf-8") as results:
        package = f"{image.package_version} ({image.suite})"
        boot = {"event": "boot", "release": image.release, "package": package, "commit": commit}
        # On a line of its own, also if the last guest died within one.
        results.write(f"\n{json.dumps(boot)}\n")
    compiled = exchange / "compiled"
    compiled.mkdir()
    subprocess.run(
        [sys.executable, "-m", "bpf.compiler", "--all", str(compiled)], cwd=checkout, check=True
    )
    _pack(checkout, compiled, exchange / "checkout.tar")
    _pack_python(files, exchange / "python.tar")
    (exchange / "packages.tar").write_bytes(files.packages)
    for script in ("guest.sh", "suite.sh"):
        shutil.copy(_HERE / script, exchange)
    settings = {
        "checkout": str(checkout),
        "modules": files.inside(image.modules),
        "release": image.release,
        "devices": " ".join(requirements.MODULES),
        "systemd": "yes" if has_systemd else "",
    }
    (exchange / "settings").write_text(
        "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
        + f"arguments=({shlex.join(arguments)})\n"
    )
    initrd = exchange / "initrd"
    initrd.write_bytes(initramfs.build(image.modules, _HERE / "init.sh", files.busybox))

    started = time.monotonic()
    with (exchange / "console.txt").open("wb") as console:
        process = subprocess.Popen(
            _command(emulator, files, image, initrd, exchange),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(limit_seconds)
            ended_in_time = True
        except subprocess.TimeoutExpired:
            ended_in_time = False
        finally:
            process.kill()
            process.wait()
    return Run(exchange, time.monotonic() - started, ended_in_time)


def _command(
    emulator: str,
    files: Files,
    image: suites.Image,
    initrd: pathlib.Path,
    exchange: pathlib.Path,
) -> list[str]:
    machine = files.architecture

    def share(tag: str, path: pathlib.Path, more: str) -> list[str]:
        # multidevs=remap: the host's files may lie on several file systems.
        options = f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap{more}"
        return ["-virtfs", options]

    return [
        # Emulation takes all of a core or two for minutes; let others go first.
        *("nice", "-n", "19", emulator or machine.emulator),
        # Not KVM: it is missing on most machines that are virtual themselves.
        *("-accel", "tcg,thread=multi", "-smp", "2"),
        *(*machine.options, "-m", str(_MEMORY_MB)),
        *("-kernel", str(image.vmlinuz), "-initrd", str(initrd)),
        *("-append", f"{_KERNEL_OPTIONS} {machine.kernel_options}"),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *share("host", files.root, ",readonly=on"),
        *share("exchange", exchange, ""),
    ]


def _pack(checkout: pathlib.Path, compiled: pathlib.Path, archive: pathlib.Path) -> None:
    """compiled: the programs, as in the image; in the guest the compiler takes minutes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=checkout,
        check=True,
        capture_output=True,
    ).stdout
    with tarfile.open(archive, "w") as tar:
        for name in sorted(set(listed.decode().split("\0")) - {""}):
            path = checkout / name
            if not path.exists():  # deleted, but not in the index yet
                continue
            tar.add(path, arcname=name)
            # Byte code that the host has: its own, and that of pytest.
            for code in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                tar.add(code, arcname=str(code.relative_to(checkout)))
        tar.add(compiled, arcname="compiled")


def _pack_python(files: Files, archive: pathlib.Path) -> None:
    """Python's modules, for the guest's memory: opening a file of the host is a round trip, and an
    agent imports a thousand."""
    with tarfile.open(archive, "w") as tar:
        for directory in files.python:
            tar.add(directory, arcname=files.inside(directory), filter=_without_tools)


def _without_tools(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = pathlib.PurePath(member.name).name
    return None if any(fnmatch.fnmatch(name, tool) for tool in _TOOLS) else member
