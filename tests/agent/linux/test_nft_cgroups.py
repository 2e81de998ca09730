"""Expressions of nft for the sockets of a cgroup."""

import os
import pathlib

import pytest

from agent.linux.nft_cgroups import CgroupGoneError, CgroupMatches, SocketMatchError
from agent.linux.pods_cgroup import PodsCgroup


def below(path: pathlib.Path) -> str:
    """As nft takes it, wherever cgroup v2 is mounted."""
    return os.path.relpath(path, "/sys/fs/cgroup")


@pytest.fixture
def matches(tmp_path: pathlib.Path) -> CgroupMatches:
    for name in ("a/b.slice", "kubepods", "kubelet/kubepods", 'a/quo"te', "a/li\nne"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    return CgroupMatches(tmp_path)


@pytest.mark.parametrize(
    ("path", "level", "name"),
    [("/a", 1, "a"), ("/a/b.slice", 2, "a/b.slice"), ("a//b.slice/", 2, "a/b.slice")],
)
def test_cgroup_is_matched_at_its_level(
    tmp_path: pathlib.Path, matches: CgroupMatches, path: str, level: int, name: str
) -> None:
    assert matches.of(path) == f'socket cgroupv2 level {level} "{below(tmp_path / name)}"'


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("/", SocketMatchError, "cgroup '/' cannot be matched"),
        ("", SocketMatchError, "cgroup '' cannot be matched"),
        ("/../a", SocketMatchError, "cgroup '/../a' cannot be matched"),
        ("/a/../a", SocketMatchError, "cgroup '/a/../a' cannot be matched"),
        ("/a/c", CgroupGoneError, "cgroup '/a/c' does not exist below {}"),
        ("/a/file", CgroupGoneError, "cgroup '/a/file' does not exist below {}"),
        ('/a/quo"te', SocketMatchError, "nft accepts no cgroup with a name like '{}/a/quo\"te'"),
        ("/a/li\nne", SocketMatchError, "nft accepts no cgroup with a name like '{}/a/li\\nne'"),
    ],
)
def test_cgroup_that_cannot_be_matched_is_one_sentence(
    tmp_path: pathlib.Path, matches: CgroupMatches, path: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(SocketMatchError) as caught:
        matches.of(path)
    assert (type(caught.value), str(caught.value)) == (kind, text.format(tmp_path))


def test_each_cgroup_above_pods_is_matched_in_order(
    tmp_path: pathlib.Path, matches: CgroupMatches
) -> None:
    assert matches.of_pods() == (
        f'socket cgroupv2 level 2 "{below(tmp_path / "kubelet/kubepods")}"',
        f'socket cgroupv2 level 1 "{below(tmp_path / "kubepods")}"',
    )
    (tmp_path / "kubepods").rmdir()
    assert len(matches.of_pods()) == 1


def test_places_of_pods_are_those_that_were_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own" / "x").mkdir(parents=True)

    class Found(PodsCgroup):
        def directories(self) -> list[pathlib.Path]:
            return [tmp_path / "own" / "x"]

    matches = CgroupMatches(tmp_path, Found(tmp_path))
    assert matches.of_pods() == (f'socket cgroupv2 level 2 "{below(tmp_path / "own/x")}"',)


def test_no_socket_is_at_the_root_with_a_level(
    tmp_path: pathlib.Path, matches: CgroupMatches
) -> None:
    assert matches.match_none() == f'socket cgroupv2 level 1 "{below(tmp_path)}"'
