"""podgate's image for another architecture, from Debian's packages of it, as `docker build
--platform` makes one where QEMU emulates programs."""

import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from tests.image import building
from tests.kernels import architectures, foreign, suites
from tests.kernels.apt import Apt
from tests.kernels.architectures import Architecture

_SCRIPT = pathlib.Path(__file__).with_name("emulate.sh")
_NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMIT_SECONDS = 3600


def build(path: pathlib.Path, name: str, architecture: Architecture) -> None:
    """Write the archive that deploy/rootfs.py makes there. It takes six minutes.

    name: of the image in it. Raises `NotToBeHadError`.
    """
    suites.make_cache()
    mirrors = suites.of_machine()
    root = foreign.root(architecture, mirrors, suites.CACHE, building.ROOT)
    environment = building.ROOT / ".venv"
    with tempfile.TemporaryDirectory(dir=root / "tmp") as made:
        copied = pathlib.Path(made)
        building.copy_sources(copied)
        sources = f"/{copied.relative_to(root)}"
        plugin = [f"{sources}/deploy/cni/build.sh", f"{environment}/bin/podgate-cni"]
        run(root, architecture, plugin)
        python = f"{environment}/bin/python"
        run(root, architecture, building.command(python, sources, name, f"{sources}/image.tar"))
        shutil.move(copied / "image.tar", path)


def run(
    root: pathlib.Path,
    architecture: Architecture | None,
    command: Sequence[str],
    *,
    sent: bytes = b"",
    **variables: str,
) -> bytes:
    """The output of a command below a root.

    architecture: None for this machine's. sent: to its standard input. Raises `CalledProcessError`.
    """
    if architecture is None:
        prefix: tuple[str, ...] = ("chroot", str(root))
    else:
        elf = f"\\x{architecture.elf:02x}\\x00"
        script = ("sh", str(_SCRIPT), str(root), str(_emulator(architecture)), elf)
        prefix = ("unshare", *_NAMESPACES, *script)
    return subprocess.run(
        [*prefix, *command],
        check=True,
        input=sent,
        stdout=subprocess.PIPE,
        env={"PATH": _PATH, "LANG": "C.UTF-8", "HOME": "/root", **variables},
        timeout=_LIMIT_SECONDS,
    ).stdout


def _emulator(architecture: Architecture) -> pathlib.Path:
    """QEMU's for single programs. Debian's package is extracted and not installed, since its
    scripts have the kernel start it everywhere on this machine. Raises `NotToBeHadError`."""
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    root = suites.CACHE / "emulator" / suite
    complete = root / ".complete"
    if not complete.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        mirror = suites.of_machine().of(suite)
        folder = suites.CACHE / "apt" / f"emulator-{suite}"
        apt = Apt({suite: mirror} if mirror else {}, architectures.of_machine().name, folder)
        apt.update()
        for archive in apt.download_all(["qemu-user-static"]):
            subprocess.run(["dpkg-deb", "--extract", archive, root], check=True)
        complete.touch()
    return (root / "usr" / "bin" / f"qemu-{architecture.machine}-static").resolve()
