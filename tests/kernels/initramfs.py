"""A small initial file system: busybox, the modules for the host's files, and a script."""

import gzip
import lzma
import os
import pathlib
import shutil
import stat
import subprocess

# What it takes to see the host's files, and to write over them in memory only.
_WANTED = ("virtio_pci", "9pnet_virtio", "9p", "overlay")


def build(modules: pathlib.Path, script: pathlib.Path) -> bytes:
    """A cpio archive with `script` as /init, which finds the modules in /modules, in their order.

    modules: the kernel's folder with modules.dep in it. Raises `FileNotFoundError` when busybox
    is not installed.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise FileNotFoundError("busybox is not installed (Debian's busybox-static)")
    archive = Archive()
    for folder in ("bin", "dev", "host", "memory", "modules", "proc", "root", "sys"):
        archive.add_folder(folder)
    archive.add_file("bin/busybox", pathlib.Path(busybox).read_bytes(), executable=True)
    archive.add_file("init", script.read_bytes(), executable=True)
    for number, path in enumerate(load_order((modules / "modules.dep").read_text(), _WANTED)):
        name = path.split("/")[-1].split(".ko")[0]
        archive.add_file(f"modules/{number:02}-{name}.ko", _uncompressed(modules / path))
    return archive.finish()


def load_order(dependencies: str, wanted: tuple[str, ...]) -> list[str]:
    """Paths of modules, each after those that it needs. What is not there is built in.

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


class Archive:
    """cpio in the "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst)."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._inode = 0

    def add_folder(self, name: str) -> None:
        self._add(name, stat.S_IFDIR | 0o755, b"")

    def add_file(self, name: str, content: bytes, *, executable: bool = False) -> None:
        self._add(name, stat.S_IFREG | (0o755 if executable else 0o644), content)

    def finish(self) -> bytes:
        self._add("TRAILER!!!", 0, b"")
        return bytes(self._data)

    def _add(self, name: str, mode: int, content: bytes) -> None:
        self._inode += 1
        encoded = os.fsencode(name) + b"\0"
        # inode, mode, uid, gid, links, mtime, size, four device numbers, name's size, checksum
        fields = [self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0]
        self._data += b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (encoded, content):
            self._data += part
            self._data += bytes(-len(self._data) % 4)
