"""Modules are loaded after what they need, and the archive is one that the kernel reads."""

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


def test_archive_holds_what_was_added() -> None:
    archive = initramfs.Archive()
    archive.add_folder("bin")
    archive.add_file("bin/odd", b"12345", executable=True)
    archive.add_file("init", b"")
    assert entries(archive.finish()) == {
        "bin": (0o040755, b""),
        "bin/odd": (0o100755, b"12345"),
        "init": (0o100644, b""),
        "TRAILER!!!": (0, b""),
    }


def entries(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Names to mode and content, read as the kernel reads them: all parts begin at 4 bytes."""
    found = {}
    position = 0
    while position < len(data):
        assert data[position : position + 6] == b"070701"
        fields = [int(data[position + 6 + 8 * i : position + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = data[position + 110 : position + 110 + name_size - 1].decode()
        start = (position + 110 + name_size + 3) // 4 * 4
        found[name] = (mode, data[start : start + size])
        position = (start + size + 3) // 4 * 4
    return found
