"""The cgroup above all pods, at any depth, and none that another user or a container can make."""

import errno
import os
import pathlib

import pytest

from agent.linux import pods_cgroup
from agent.linux.pods_cgroup import PodsCgroup, above_pods
from agent.linux.procfs import Procfs

UID = "0b6e3f5a-9d0c-4f3e-8a52-7a1f6f1d2c3b"
OTHER = "1b6e3f5a-9d0c-4f3e-8a52-7a1f6f1d2c3b"
STATIC = "d41d8cd98f00b204e9800998ecf8427e"
BY_SYSTEMD = UID.replace("-", "_")


class Node:
    """A hierarchy of cgroups, and processes in it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.root, self._proc = directory / "cgroup", directory / "proc"
        self.root.mkdir()
        self._proc.mkdir()
        self.pods = PodsCgroup(self.root, Procfs(self._proc))

    def cgroup(self, path: str) -> int:
        directory = self.root / path
        directory.mkdir(parents=True, exist_ok=True)
        return directory.stat().st_ino

    def process(self, pid: int, cgroup: str) -> None:
        self.cgroup(cgroup)
        (self._proc / str(pid)).mkdir()
        (self._proc / str(pid) / "cgroup").write_text(f"1:name=systemd:/\n0::/{cgroup}\n")


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("kubepods.slice", 1),
        ("kubepods", 1),
        ("kubelet.slice/kubelet-kubepods.slice", 2),
        ("kubelet/kubepods", 2),
        ("x/kubepods", 2),
    ],
)
def test_usual_place_counts_while_no_pod_shows_another(node: Node, name: str, level: int) -> None:
    number = node.cgroup(name)
    assert node.pods.identity() == (number, level)
    assert node.pods.directories() == [node.root / name]


def test_node_without_pods_has_no_such_cgroup(node: Node) -> None:
    node.cgroup("system.slice")
    assert node.pods.identity() is None
    assert PodsCgroup(None).identity() is None
    assert not PodsCgroup(None).search({UID})


@pytest.mark.parametrize(
    ("above", "pod", "uid"),
    [
        ("x/y/z/kubepods", f"burstable/pod{UID}/0", UID),
        ("x/kubepods", f"pod{STATIC}/0", STATIC),
        ("a.slice/a-b.slice/a-b-kubepods.slice", f"a-b-kubepods-pod{BY_SYSTEMD}.slice/0", UID),
        ("kubepods", f"besteffort/pod{UID}", UID),
        # A node in a pod of another node, as in tests of Kubernetes.
        (f"kubepods/pod{OTHER}/0/kubelet/kubepods", f"pod{UID}/0", UID),
    ],
)
def test_process_of_a_pod_shows_it_at_any_depth(node: Node, above: str, pod: str, uid: str) -> None:
    node.process(7, "system.slice/kubelet.service")
    node.process(8, f"{above}/{pod}")
    assert node.pods.search({uid})
    assert node.pods.confirmed == node.root / above
    number = (node.root / above).stat().st_ino
    assert node.pods.identity() == (number, len(above.split("/")))
    assert not node.pods.search({uid})


def test_what_a_pod_shows_counts_and_not_a_usual_place(node: Node) -> None:
    old = node.cgroup("kubepods")
    assert node.pods.identity() == (old, 1)
    node.process(7, f"x/y/kubepods/pod{UID}/0")
    assert node.pods.search({UID})
    assert node.pods.directories() == [node.root / "x/y/kubepods"]
    assert node.pods.identity() == ((node.root / "x/y/kubepods").stat().st_ino, 3)


def test_place_that_is_gone_is_searched_again(node: Node) -> None:
    node.process(7, f"x/y/kubepods/pod{UID}")
    assert node.pods.search({UID})
    (node.root / f"x/y/kubepods/pod{UID}").rmdir()
    (node.root / "x/y/kubepods").rmdir()
    assert node.pods.confirmed is None
    assert node.pods.identity() is None
    number = node.cgroup("x/y/kubepods")
    assert node.pods.search({UID}) or node.pods.confirmed
    assert node.pods.identity() == (number, 3)


def test_cgroup_that_a_container_makes_below_its_own_does_not_count() -> None:
    path = f"/kubepods/pod{OTHER}/0/kubepods/pod{UID}/0"
    assert above_pods(path, {UID, OTHER}) == ("kubepods",)


@pytest.mark.parametrize(
    "path", [f"/docker/0/pod{UID}", f"/kubepods/pod{OTHER}", "/kubepods/podx", "/", "/kubepods"]
)
def test_other_processes_show_nothing(path: str) -> None:
    assert above_pods(path, {UID}) is None


def test_cgroup_in_a_directory_of_a_user_does_not_count(node: Node) -> None:
    node.process(7, f"user/session/kubepods/pod{UID}")
    os.chown(node.root / "user/session", 1000, 1000)
    assert not node.pods.search({UID})
    node.cgroup("other/kubepods")
    os.chown(node.root / "other", 1000, 1000)
    assert node.pods.identity() is None


def test_search_has_a_bound(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods_cgroup, "_MAX_PROCESSES", 3)
    read: list[int | str] = []

    class Counting(Procfs):
        def cgroup(self, pid: int | str) -> str | None:
            read.append(pid)
            return "/"

    for pid in range(1, 10):
        node.process(pid, "a")
    assert not PodsCgroup(node.root, Counting(node.root.parent / "proc")).search({UID})
    assert len(read) == 3


@pytest.mark.parametrize(
    ("path", "uids", "expected"),
    [
        (f"/kubepods/burstable/pod{UID}/0", {UID}, ("kubepods",)),
        # The nearest cgroup of that name above the pod, and none of a pod's name.
        (f"/kubepods/x/kubepods/pod{UID}", {UID}, ("kubepods", "x", "kubepods")),
        (f"/a/kubepods/kubepods-pod{OTHER}/pod{UID}", {UID}, ("a", "kubepods")),
        (f"/kubepods-pod{OTHER}.slice/pod{UID}", {UID}, None),
        # A name on the way must be one as a whole.
        (f"/kubepods.slices/pod{UID}", {UID}, None),
        (f"/xkubepods/pod{UID}", {UID}, None),
        (f"/x-kubepods/pod{UID}", {UID}, ("x-kubepods",)),
        (f"/pod{UID}", {UID}, None),
        (f"/pod{UID}/kubepods", {UID}, None),
        (f"/kubepods/xpod{UID}", {UID}, None),
    ],
)
def test_cgroup_above_pods_is_the_nearest_of_the_kubelet_s_names(
    path: str, uids: set[str], expected: tuple[str, ...] | None
) -> None:
    assert above_pods(path, uids) == expected


def test_usual_places_are_the_root_first_and_then_directories_by_name(node: Node) -> None:
    names = ("kubepods", "kubepods.slice", "a.slice/a-kubepods.slice", "a.slice/kubepods")
    for name in (*names, "b/kubepods", "b/a-kubepods.slice", "c/d/kubepods"):
        node.cgroup(name)
    (node.root / "file").touch()
    (node.root / "link").symlink_to(node.root / "b")
    (node.root / "e").mkdir()
    (node.root / "e" / "kubepods").touch()
    assert [str(one.relative_to(node.root)) for one in node.pods.directories()] == [
        *("kubepods.slice", "kubepods"),
        *("a.slice/a-kubepods.slice", "a.slice/kubepods", "b/kubepods"),
    ]


def test_place_that_was_found_counts_as_long_as_it_exists(node: Node) -> None:
    old = node.cgroup("kubepods")
    assert node.pods.identity() == (old, 1)
    new = node.cgroup("kubepods.slice")
    assert node.pods.identity() == (old, 1)
    (node.root / "kubepods").rmdir()
    assert node.pods.identity() == (new, 1)
    (node.root / "kubepods.slice").rmdir()
    assert node.pods.identity() is None
    (node.root / "kubepods").touch()
    assert node.pods.identity() is None


def test_depth_is_counted_from_the_root_of_all(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    number = node.cgroup("x/kubepods")
    for level, expected in ((2, (number, 4)), (0, (number, 2)), (None, None)):
        monkeypatch.setattr(pods_cgroup, "root_level", lambda root, level=level: level)
        assert node.pods.identity() == expected


@pytest.mark.parametrize("call", ["scandir", "lstat"])
@pytest.mark.parametrize(
    ("number", "is_own"), [(errno.ENOENT, False), (errno.ENOMEM, True), (errno.EMFILE, True)]
)
def test_place_that_cannot_be_read_is_none_or_unknown(
    node: Node, monkeypatch: pytest.MonkeyPatch, call: str, number: int, is_own: bool
) -> None:
    """It may be removed meanwhile, and this process may have no descriptor or memory left."""
    node.cgroup("kubepods")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    # os.path.lexists() has its own.
    monkeypatch.setattr(os.path, "lexists", lambda path: True)
    monkeypatch.setattr(os, call, fail)
    if is_own:
        with pytest.raises(OSError, match=os.strerror(number)):
            node.pods.identity()
    else:
        assert node.pods.identity() is None
        assert node.pods.directories() == []


def test_another_place_of_pods_is_noticed(node: Node) -> None:
    node.process(7, f"x/kubepods/pod{UID}")
    node.process(8, "a")
    node.process(9, f"y/kubepods/pod{OTHER}")
    assert [node.pods.search({UID}), node.pods.search({UID})] == [True, False]
    assert node.pods.search({OTHER})
    assert node.pods.confirmed == node.root / "y/kubepods"
    assert not node.pods.search(set())
    assert node.pods.confirmed == node.root / "y/kubepods"
