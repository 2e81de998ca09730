"""A small initial file system: busybox, the modules for the host's files, and a script."""

import gzip
import lzma
import pathlib
import shutil
import subprocess
import tempfile

# What it takes to see the host's files, and to write over them in memory only.
_WANTED = ("virtio_pci", "9pnet_virtio", "9p", "overlay")


def build(modules: pathlib.Path, script: pathlib.Path, guests: pathlib.Path | None = None) -> bytes:
    """A cpio archive with `script` as /init, which finds the modules in /modules, in their order.

    modules: the kernel's folder with modules.dep in it; guests: the busybox that the guest runs, by
    default this machine's. Raises `FileNotFoundError` when busybox is not installed.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise FileNotFoundError("busybox is not installed (Debian's busybox-static)")
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in ("bin", "dev", "host", "memory", "modules", "proc", "root", "sys"):
            (root / name).mkdir()
        shutil.copy(guests or busybox, root / "bin/busybox")
        shutil.copy(script, root / "init")
        (root / "init").chmod(0o755)
        for number, path in enumerate(load_order((modules / "modules.dep").read_text(), _WANTED)):
            name = path.split("/")[-1].split(".ko")[0]
            (root / f"modules/{number:02}-{name}.ko").write_bytes(_uncompressed(modules / path))
        names = [str(path.relative_to(root)) for path in sorted(root.rglob("*"))]
        return subprocess.run(
            [busybox, "cpio", "-o", "-H", "newc"],
            cwd=root,
            input="\n".join(names).encode(),
            capture_output=True,
            check=True,
        ).stdout


def load_order(dependencies: str, wanted: tuple[str, ...]) -> list[str]:
    """Paths of modules, each after those that it needs. Missing ones are built in.

    dependencies: the text of modules.dep; each line names all that a module needs, its nearest
    need first, so that the reverse is the order to load in.
    """
    needs = {}
    for line in dependencies.splitlines():
        path, _, others = line.partition(":")
        needs[path.split("/")[-1].split(".ko")[0].replace("-", "_")] = [path, *others.split()]
    found: dict[str, None] = {}
    for name in wanted:
        found |= dict.fromkeys(reversed(needs.get(name, [])))
    return list(found)


def _uncompressed(path: pathlib.Path) -> bytes:
    data = path.read_bytes()
    match path.suffix:
        case ".xz":
            return lzma.decompress(data)
        case ".gz":
            return gzip.decompress(data)
        case ".zst":
            return subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout
    return data
