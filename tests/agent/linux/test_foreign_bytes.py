"""Files and messages of the kernel with any bytes: read as the kernel wrote them, or unknown.

Names of processes, cgroups, mounts and interfaces may have bytes that `str.splitlines` and
`str.split` take for separators, and bytes that are not UTF-8.
"""

import os
import pathlib
import tempfile
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kubelet import search
from agent.kubelet.search import KubeletCgroupError
from agent.linux import cgroups, rtnetlink
from agent.linux.procfs import Procfs
from agent.settings import ByProcess
from bpf import netlink

SYS_ADMIN = 21
# Separators of str.splitlines and str.split that the kernel lets names have, and bytes of no text.
ODD = [b"\x0b", b"\x0c", b"\r", b"\x1c", b"\x1d", b"\x1e", b"\xc2\x85", b"\xe2\x80\xa8", b"\xff"]
NAMES = st.binary(min_size=1, max_size=20).filter(lambda name: not set(name) & set(b"\0/\n"))


@pytest.fixture(scope="module")
def root() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as directory:
        made = pathlib.Path(directory)
        for name in ("42/fd", "42/net", "42/ns", "self/net", "self/ns"):
            (made / name).mkdir(parents=True)
        for process in ("42", "self"):
            (made / process / "ns" / "user").symlink_to("user:[1]")
            (made / process / "ns" / "net").symlink_to("net:[1]")
        yield made


@pytest.mark.parametrize("odd", ODD)
def test_process_cannot_write_a_line_of_its_own_into_its_status(
    root: pathlib.Path, odd: bytes
) -> None:
    """The name has 15 bytes; CAP_SYS_ADMIN is what makes a process the kubelet."""
    (root / "42" / "status").write_bytes(
        b"Name:\tx" + odd + b"CapEff: 200000\nCapEff:\t0000000000000000\n"
    )
    assert not Procfs(root).has_capability(42, SYS_ADMIN)


@given(path=st.lists(NAMES, min_size=1, max_size=3).map(b"/".join))
def test_cgroup_is_read_whatever_its_name_is(root: pathlib.Path, path: bytes) -> None:
    (root / "42" / "cgroup").write_bytes(b"12:cpu:/a\n0::/" + path + b"\n")
    found = Procfs(root).cgroups(42)
    assert os.fsencode(found["0"]) == b"/" + path
    assert found["12"] == "/a"


@given(name=NAMES)
def test_process_is_named_whatever_its_name_is(root: pathlib.Path, name: bytes) -> None:
    (root / "42" / "comm").write_bytes(name[:15] + b"\n")
    assert Procfs(root).is_named(42, os.fsdecode(name))
    # For reports, which are JSON.
    msgspec.json.encode(Procfs(root).name(42))


@given(content=st.binary(max_size=200))
def test_no_file_of_proc_ends_its_reader(root: pathlib.Path, content: bytes) -> None:
    for name in ("comm", "stat", "status", "cgroup", "net/tcp", "net/tcp6", "net/packet"):
        (root / "42" / name).write_bytes(content)
    (root / "self" / "net" / "packet").write_bytes(content)
    procfs = Procfs(root)
    procfs.is_named(42, "kubelet")
    procfs.started(42)
    procfs.parent(42)
    procfs.has_capability(42, SYS_ADMIN)
    procfs.cgroup(42)
    procfs.name(42)
    procfs.packet_sockets()
    procfs.listeners(42, 80)


@given(content=st.binary(max_size=200))
def test_no_process_ends_the_search_for_the_kubelet(root: pathlib.Path, content: bytes) -> None:
    (root / "42" / "comm").write_bytes(b"kubelet\n")
    (root / "42" / "status").write_bytes(b"CapEff:\t000001ffffffffff\n")
    (root / "42" / "stat").write_bytes(b"42 (kubelet) S " + b"1 " * 30)
    (root / "42" / "cgroup").write_bytes(b"0::/" + content)
    try:
        found = search.find(ByProcess(), procfs=Procfs(root), cgroup2=root)
    except KubeletCgroupError as error:
        msgspec.json.encode(str(error))
    else:
        msgspec.json.encode(found.path if found else "")


MOUNTS = b"30 24 0:26 / %b rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize("odd", ODD)
def test_mount_of_any_name_hides_no_other(
    tmp_path: pathlib.Path, odd: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    others = b"1 2 0:3 / /mnt/a" + odd + b"b rw - tmpfs t rw\n" + odd + b" / /x - " + odd + b"\n"
    mounts.write_bytes(others + MOUNTS % os.fsencode(tmp_path))
    monkeypatch.setattr(cgroups, "_ROOT_INODE", tmp_path.stat().st_ino)
    assert cgroups.cgroup2_mount(mounts) == tmp_path


@pytest.mark.parametrize("odd", [*ODD, b" ", b"\n", b"\\", "ü".encode()])
def test_mount_of_cgroup2_may_have_any_name(
    tmp_path: pathlib.Path, odd: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / os.fsdecode(b"a" + odd + b"b")
    place.mkdir()
    monkeypatch.setattr(cgroups, "_ROOT_INODE", place.stat().st_ino)
    shown = os.fsencode(place)
    for escaped in b"\\ \n":
        shown = shown.replace(bytes([escaped]), b"\\%03o" % escaped)
    mounts = tmp_path / "mounts"
    mounts.write_bytes(MOUNTS % shown)
    assert cgroups.cgroup2_mount(mounts) == place


@given(
    content=st.binary(max_size=200) | st.lists(NAMES).map(lambda names: MOUNTS % b" ".join(names))
)
def test_no_table_of_mounts_ends_its_reader(root: pathlib.Path, content: bytes) -> None:
    (root / "mounts").write_bytes(content)
    cgroups.cgroup2_mount(root / "mounts")


@pytest.mark.parametrize("odd", ODD)
def test_cgroups_of_any_name_can_be_reported(
    tmp_path: pathlib.Path, odd: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / os.fsdecode(b"a" + odd) / "b"
    place.mkdir(parents=True)
    monkeypatch.setattr(cgroups, "cgroup2_mount", lambda: tmp_path)
    number = place.stat().st_ino
    path = cgroups.cgroup_paths({number})[number]
    assert path.endswith("/b")
    msgspec.json.encode(path)


@given(content=st.binary(max_size=200))
def test_no_message_of_netlink_ends_its_reader(content: bytes) -> None:
    for message in netlink.decode(content):
        netlink.attributes(message.content, netlink.HEADER_BYTES)
    netlink.attributes(content)


@given(
    name=NAMES,
    values=st.dictionaries(st.integers(0, 63), st.binary(max_size=12), max_size=5),
    info=st.dictionaries(st.integers(0, 3), st.binary(max_size=12), max_size=3),
)
def test_interface_is_read_whatever_its_name_is(
    name: bytes, values: dict[int, bytes], info: dict[int, bytes]
) -> None:
    nested = b"".join(netlink.attribute(kind, value) for kind, value in info.items())
    body = bytes(16) + b"".join(
        netlink.attribute(kind, value)
        for kind, value in {**values, 18: nested, 3: name + b"\0"}.items()
    )
    link = rtnetlink.parse(netlink.encode(16, 0, body))
    assert link.name == name.rstrip(b"\0").decode(errors="replace")
    msgspec.json.encode(link.name)
