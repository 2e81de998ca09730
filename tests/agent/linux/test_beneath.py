"""Names below a directory are followed, and never out of it."""

import errno
import os
import pathlib
from collections.abc import Iterator

import pytest

from agent.linux import beneath


@pytest.fixture
def root(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A tree, with links in and out of it; no descriptor is left open."""
    made = tmp_path / "root"
    (made / "a" / "b").mkdir(parents=True)
    (made / "file").write_bytes(b"content")
    (made / "inner").symlink_to("a")
    (made / "outer").symlink_to(tmp_path)
    (made / "a" / "to-file").symlink_to("../file")
    (made / "a" / "b" / "twelve").write_bytes(b"twelve bytes")
    (made / "a" / "to-twelve").symlink_to("b/twelve")
    os.mkfifo(made / "a" / "fifo")
    (tmp_path / "secret").write_bytes(b"secret")
    before = os.listdir("/proc/self/fd")
    yield made
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("names", "found"), [((), ""), (("a",), "a"), (("a", "b"), "a/b")])
def test_directory_is_opened_name_by_name(
    root: pathlib.Path, names: tuple[str, ...], found: str
) -> None:
    descriptor = beneath.open_directory(root, *names)
    assert os.path.samestat(os.fstat(descriptor), (root / found).stat())
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("names", "number"),
    [
        (("inner",), errno.ELOOP),
        (("outer",), errno.ELOOP),
        (("a", ".."), errno.EXDEV),
        (("..",), errno.EXDEV),
        (("/",), errno.EXDEV),
        (("file",), errno.ENOTDIR),
        (("a", "missing"), errno.ENOENT),
    ],
)
def test_directory_that_a_name_leads_out_to_is_not_opened(
    root: pathlib.Path, names: tuple[str, ...], number: int
) -> None:
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        beneath.open_directory(root, *names)
    assert caught.value.errno == number


@pytest.mark.parametrize(
    ("name", "max_bytes", "found"),
    [
        ("b/twelve", 12, b"twelve bytes"),
        ("to-twelve", 12, b"twelve bytes"),
        ("to-twelve", 4096, b"twelve bytes"),
        ("b/twelve", 11, errno.EFBIG),
        ("b", 100, errno.EINVAL),
        ("fifo", 100, errno.EINVAL),
        ("to-file", 100, errno.EXDEV),
        ("../file", 100, errno.EXDEV),
        ("missing", 100, errno.ENOENT),
    ],
)
def test_file_is_read_if_it_is_below_and_no_longer_than_allowed(
    root: pathlib.Path, name: str, max_bytes: int, found: bytes | int
) -> None:
    descriptor = beneath.open_directory(root, "a")
    try:
        content: bytes | int | None = beneath.read_file(descriptor, name, max_bytes)
    except OSError as error:
        content = error.errno
    os.close(descriptor)
    assert content == found
