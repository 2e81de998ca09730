"""The files of a guest of another architecture: Debian's packages, and those of podgate's tests.

Debian's are extracted and not installed: their scripts run programs of that architecture.
"""

import io
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
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
    *("bpftool", "curl", "dpkg", "iproute2", "nftables", "openssl", "python3", "python3-bpfcc"),
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
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_USERS = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
_GROUPS = "root:x:0:\nnogroup:x:65534:\n"


def files(
    architecture: Architecture, mirrors: Mirrors, cache: pathlib.Path, checkout: pathlib.Path
) -> Files:
    """Raises `NotToBeHadError`."""
    made = root(architecture, mirrors, cache, checkout)
    python = (made / "usr" / "lib" / _PYTHON, _modules(made, checkout))
    busybox = made / "usr" / "bin" / "busybox"
    return Files(architecture, made, python, packages.NONE, busybox)


def root(
    architecture: Architecture, mirrors: Mirrors, cache: pathlib.Path, checkout: pathlib.Path
) -> pathlib.Path:
    """Made below `cache` unless it exists with the same packages. Raises `NotToBeHadError`.

    Of the suite of this machine, so that its byte code is valid there. The virtual environment of
    podgate and its tests is at the checkout's path.
    """
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    root = cache / "foreign" / f"{suite}-{architecture.name}"
    modules = _modules(root, checkout)
    made_of = "\n".join((*_PACKAGES, *requirements(checkout)))
    complete = root / ".complete"
    if not complete.exists() or complete.read_text() != made_of:
        shutil.rmtree(root, ignore_errors=True)
        names = (suite, f"{suite}-security")
        sources = {name: uri for name in names if (uri := mirrors.of(name))}
        apt = Apt(sources, architecture.name, cache / "apt" / f"root-{suite}-{architecture.name}")
        apt.update()
        _extract(apt.download_all(_PACKAGES), root)
        _make_environment(modules, architecture, checkout)
        compiled = [root / "usr" / "lib" / _PYTHON, root / "usr" / "lib" / "python3", modules]
        compile_all = (sys.executable, "-m", "compileall", "-q", "-s", str(root), "-p", "/")
        subprocess.run([*compile_all, *compiled], check=False, stdout=subprocess.DEVNULL)
        complete.write_text(made_of)
    return root


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
    database = root / "var" / "lib" / "dpkg"
    (database / "info").mkdir(parents=True)
    entries = []
    for archive in archives:
        packed = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True
        ).stdout
        subprocess.run(unpack, check=True, input=packed)
        entry = subprocess.run(
            ["dpkg-deb", "--field", archive], check=True, capture_output=True, text=True
        ).stdout
        entries.append(f"{entry}Status: install ok installed\n")
        with tarfile.open(fileobj=io.BytesIO(packed)) as members:
            names = (name.removeprefix(".") for name in members.getnames())
            paths = "".join(f"{name or '/.'}\n" for name in names)
        (package,) = re.findall(r"^Package: (\S+)$", entry, re.MULTILINE)
        (database / "info" / f"{package}.list").write_text(paths)
    (database / "status").write_text("\n".join(entries))
    # What the packages' own scripts would have made.
    if not (root / "bin" / "sh").exists():
        (root / "bin" / "sh").symlink_to("dash")
    etc = root / "etc"
    for name, text in (("passwd", _USERS), ("group", _GROUPS), ("hosts", "127.0.0.1 localhost\n")):
        (etc / name).write_text(text)
    for name in ("dev", "exchange", "proc", "root", "run", "sys", "tmp"):
        (root / name).mkdir(exist_ok=True)


def _modules(root: pathlib.Path, checkout: pathlib.Path) -> pathlib.Path:
    environment = root / checkout.relative_to("/") / ".venv"
    return environment / "lib" / _PYTHON / "site-packages"


def _make_environment(
    modules: pathlib.Path, architecture: Architecture, checkout: pathlib.Path
) -> None:
    """As `deploy/setup.sh` does, of packages without their programs."""
    environment = modules.parents[2]
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
