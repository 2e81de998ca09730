"""Modules are loaded after what they need, and the archive is one that the kernel reads."""

import lzma
import pathlib
import subprocess

from tests.kernels import initramfs

DEPENDENCIES = """\
kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet.ko.xz:
kernel/fs/netfs/netfs.ko.xz:
kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko.xz
"""


def test_each_module_comes_once_and_after_its_needs() -> None:
    order = initramfs.load_order(DEPENDENCIES, ("virtio_pci", "9pnet_virtio", "9p"))
    names = [path.split("/")[-1] for path in order]
    assert names == ["9pnet.ko.xz", "9pnet_virtio.ko.xz", "netfs.ko.xz", "9p.ko.xz"]


def test_archive_holds_busybox_the_script_and_the_modules_in_order(tmp_path: pathlib.Path) -> None:
    modules = tmp_path / "6.1.0"
    for line in DEPENDENCIES.splitlines():
        path = modules / line.partition(":")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(path.name.encode()))
    (modules / "modules.dep").write_text(DEPENDENCIES)
    script = tmp_path / "init.sh"
    script.write_text("#!/bin/busybox sh\n")

    archive = initramfs.build(modules, script)
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["busybox", "cpio", "-i"], cwd=root, input=archive, check=True)
    assert archive.startswith(b"070701")  # "newc", the only format that the kernel reads
    assert {path.name: path.read_text() for path in (root / "modules").iterdir()} == {
        "00-9pnet.ko": "9pnet.ko.xz",
        "01-9pnet_virtio.ko": "9pnet_virtio.ko.xz",
        "02-netfs.ko": "netfs.ko.xz",
        "03-9p.ko": "9p.ko.xz",
    }
    assert (root / "init").read_text() == script.read_text()
    for name in ("init", "bin/busybox"):
        assert (root / name).stat().st_mode == 0o100755
    for name in ("dev", "host", "memory", "proc", "root", "sys"):
        assert (root / name).is_dir()
