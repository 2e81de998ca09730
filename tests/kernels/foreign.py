"""The files of a guest of another architecture: Debian's packages, and those of podgate's tests.

Debian's are extracted and not installed: their scripts run programs of that architecture.
"""

import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator

from tests.kernels import packages
from tests.kernels.apt import Apt
from tests.kernels.architectures import Architecture
from tests.kernels.guests import Files
from tests.kernels.suites import Image, Mirrors

_PACKAGES = (
    *("base-files", "bash", "coreutils", "dash", "findutils", "grep", "gzip", "sed", "tar"),
    *("busybox-static", "kmod", "libc-bin", "mount", "procps", "util-linux"),
    *("bpftool", "curl", "iproute2", "nftables", "openssl", "python3", "python3-bpfcc"),
    *("containernetworking-plugins", "gcc", "libc6-dev"),
)
# Tools that no kernel test runs; some have no package for other architectures.
_TOOLS = {
    *("clang-format", "cosmic-ray", "hatchling", "import-linter", "mypy", "podgate", "ruff"),
    *("types-jsonschema", "types-PyYAML"),
}
# It is published as sources only; podgate's tests use none of its compiled parts.
_FROM_SOURCES = "forbiddenfruit"
_PLATFORMS = {"arm64": "aarch64-manylinux_2_36"}
_USERS = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
_GROUPS = "root:x:0:\nnogroup:x:65534:\n"


def files(
    architecture: Architecture, mirrors: Mirrors, cache: pathlib.Path, checkout: pathlib.Path
) -> Files:
    """Made below `cache` unless they exist with the same packages. Raises `NotToBeHadError`.

    Of the suite of this machine, so that its byte code is valid there.
    """
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    root = cache / "foreign" / f"{suite}-{architecture.name}"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    environment = root / checkout.relative_to("/") / ".venv"
    modules = environment / "lib" / version / "site-packages"
    made_of = "\n".join((*_PACKAGES, *requirements(checkout)))
    complete = root / ".complete"
    if not complete.exists() or complete.read_text() != made_of:
        shutil.rmtree(root, ignore_errors=True)
        names = (suite, f"{suite}-security")
        sources = {name: uri for name in names if (uri := mirrors.of(name))}
        apt = Apt(sources, architecture.name, cache / "apt" / f"root-{suite}-{architecture.name}")
        apt.update()
        _extract(apt.download_all(_PACKAGES), root)
        _make_environment(environment, modules, architecture, checkout)
        compiled = [root / "usr" / "lib" / version, root / "usr" / "lib" / "python3", modules]
        compile_all = (sys.executable, "-m", "compileall", "-q", "-s", str(root), "-p", "/")
        subprocess.run([*compile_all, *compiled], check=False, stdout=subprocess.DEVNULL)
        complete.write_text(made_of)
    python = (root / "usr" / "lib" / version, modules)
    busybox = root / "usr" / "bin" / "busybox"
    return Files(architecture, root, python, packages.NONE, busybox)


def with_modules(root: pathlib.Path, image: Image) -> Image:
    """The image with its modules below the root, where a guest finds them."""
    inside = root / "usr" / "lib" / "modules" / image.release
    if not inside.exists():
        shutil.copytree(image.modules, inside, symlinks=True)
    return Image(image.vmlinuz, inside, image.package_version, image.suite)


def _extract(archives: list[pathlib.Path], root: pathlib.Path) -> None:
    root.mkdir(parents=True)
    for name in ("bin", "lib", "sbin"):  # as usrmerge has them
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    unpack = ("tar", "-x", "--keep-directory-symlink", "-C", str(root))
    for archive in archives:
        packed = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True
        ).stdout
        subprocess.run(unpack, check=True, input=packed)
    # What the packages' own scripts would have made.
    if not (root / "bin" / "sh").exists():
        (root / "bin" / "sh").symlink_to("dash")
    etc = root / "etc"
    for name, text in (("passwd", _USERS), ("group", _GROUPS), ("hosts", "127.0.0.1 localhost\n")):
        (etc / name).write_text(text)
    for name in ("dev", "exchange", "proc", "root", "run", "sys", "tmp"):
        (root / name).mkdir(exist_ok=True)


def _make_environment(
    environment: pathlib.Path,
    modules: pathlib.Path,
    architecture: Architecture,
    checkout: pathlib.Path,
) -> None:
    """As `deploy/setup.sh` does, of packages without their programs."""
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
    for name in ("python", "python3"):
        (environment / "bin" / name).symlink_to("/usr/bin/python3")
    install = [str(checkout / ".venv" / "bin" / "uv"), "pip", "install", "-q"]
    install += ["--target", str(modules), "--python-platform", _PLATFORMS[architecture.name]]
    install += ["--python-version", f"{sys.version_info.major}.{sys.version_info.minor}"]
    install += ["--only-binary", ":all:", "--no-binary", _FROM_SOURCES]
    install += ["-c", str(checkout / "deploy" / "constraints.txt"), *requirements(checkout)]
    subprocess.run(install, check=True, cwd=checkout)
    (modules / "bcc").symlink_to("/usr/lib/python3/dist-packages/bcc")


def requirements(checkout: pathlib.Path) -> Iterator[str]:
    """Of podgate and its tests."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    for one in (*project["dependencies"], *(each for name in optional for each in optional[name])):
        found = re.match(r"[\w-]+", one)
        if found and found[0] not in _TOOLS:
            yield one
