"""Where cgroups of sources are found, and where they do not count."""

import os
import pathlib
import select
from collections.abc import Iterator
from typing import cast

import pytest

from agent.linux.inotify import DirectoryWatches
from agent.linux.pods_cgroup import PodsCgroup
from agent.policy.api_types import RuleSource
from agent.policy.source_cgroups import SourceCgroups

UID = "0b6e3f5a-9d0c-4f3e-8a52-7a1f6f1d2c3b"
STATIC = "d41d8cd98f00b204e9800998ecf8427e"
BY_SYSTEMD = UID.replace("-", "_")
PODS = RuleSource("pods", "{}")


def unit(name: str) -> RuleSource:
    return RuleSource("unit", name)


@pytest.fixture
def watches() -> Iterator[DirectoryWatches]:
    made = DirectoryWatches()
    yield made
    made.close()


def found(root: pathlib.Path, source: RuleSource, *uids: str) -> list[tuple[int, int | None]]:
    cgroups = SourceCgroups(root).resolve([source], {source.name: uids})
    return [(one.id, one.level) for one in cgroups.get(source.name, ())]


def test_path_is_that_of_a_directory_below_the_root(tmp_path: pathlib.Path) -> None:
    service = tmp_path / "system.slice" / "a.service"
    service.mkdir(parents=True)
    (service / "cgroup.procs").touch()
    number = service.stat().st_ino
    assert found(tmp_path, RuleSource("exact", "/system.slice/a.service")) == [(number, 2)]
    assert found(tmp_path, RuleSource("exact", "/")) == [(tmp_path.stat().st_ino, 0)]
    for path in ("/nowhere", "/system.slice/a.service/cgroup.procs", "/" + "x" * 5000):
        assert found(tmp_path, RuleSource("exact", path)) == []
    assert SourceCgroups(None).resolve([RuleSource("exact", "/")], {}) == {}
    (tmp_path / "cgroup.type").touch()
    assert found(tmp_path, RuleSource("subtree", "/system.slice")) == [
        ((tmp_path / "system.slice").stat().st_ino, None)
    ]


@pytest.mark.parametrize(
    "path",
    [
        "system.slice/a.service",
        "a.service",
        "custom.slice/custom-deep.slice/a.service",
        "user.slice/user-1000.slice/a.service",
    ],
)
def test_unit_is_found_in_whichever_slice_it_is(tmp_path: pathlib.Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    number = (tmp_path / path).stat().st_ino
    assert found(tmp_path, unit("a.service")) == [(number, len(path.split("/")))]
    assert found(tmp_path, unit("b.service")) == []


@pytest.mark.parametrize(
    "path",
    [
        "user.slice/user-1000.slice/user@1000.service/app.slice/a.service",
        "system.slice/docker-0.scope/system.slice/a.service",
        "kubepods.slice/kubepods-pod0.slice/a.service",
        "docker/0/a.service",
    ],
)
def test_cgroup_that_a_user_or_container_made_is_no_unit(tmp_path: pathlib.Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert found(tmp_path, unit("a.service")) == []


def test_slice_that_a_user_owns_has_no_units(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own.slice" / "a.service").mkdir(parents=True)
    os.chown(tmp_path / "own.slice", 1000, 1000)
    assert found(tmp_path, unit("a.service")) == []
    # The unit itself may be a user's: root has named it.
    (tmp_path / "user.slice" / "user@1000.service").mkdir(parents=True)
    os.chown(tmp_path / "user.slice" / "user@1000.service", 1000, 1000)
    assert len(found(tmp_path, unit("user@1000.service"))) == 1


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"kubepods/pod{UID}", UID),
        (f"kubepods/burstable/pod{UID}", UID),
        (f"kubepods/besteffort/pod{STATIC}", STATIC),
        (f"kubelet/kubepods/besteffort/pod{UID}", UID),
        (f"kubepods.slice/kubepods-pod{BY_SYSTEMD}.slice", UID),
        (f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{BY_SYSTEMD}.slice", UID),
        (
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
            f"kubelet-kubepods-besteffort-pod{BY_SYSTEMD}.slice",
            UID,
        ),
    ],
)
def test_pod_is_found_where_the_kubelet_makes_its_cgroup(
    tmp_path: pathlib.Path, path: str, uid: str
) -> None:
    (tmp_path / path).mkdir(parents=True)
    number = (tmp_path / path).stat().st_ino
    assert found(tmp_path, PODS, uid) == [(number, len(path.split("/")))]
    assert found(tmp_path, PODS, "another", STATIC if uid == UID else UID) == []


@pytest.mark.parametrize(
    "path",
    [
        f"kubepods/pod0/container/kubepods/pod{UID}",
        f"docker/0/kubepods/pod{UID}",
        f"user.slice/user-1000.slice/kubepods/pod{UID}",
        f"system.slice/pod{UID}",
    ],
)
def test_cgroup_elsewhere_with_a_pods_name_is_no_pod(tmp_path: pathlib.Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert found(tmp_path, PODS, UID) == []


@pytest.mark.parametrize(
    ("source", "there", "path"),
    [
        (unit("a.service"), "system.slice", "system.slice/a.service"),
        (unit("a.service"), "system.slice", "system.slice/system-x.slice/a.service"),
        (PODS, "kubepods/besteffort", f"kubepods/besteffort/pod{UID}"),
        (PODS, "kubelet", f"kubelet/kubepods/besteffort/pod{UID}"),
        (PODS, "unrelated-1", f"kubepods/pod{UID}"),
        (RuleSource("exact", "/a/b/c"), "a", "a/b/c"),
        (RuleSource("exact", "/a/b"), "a/b", "a/b"),
    ],
)
def test_each_change_of_a_sources_cgroup_is_reported(
    tmp_path: pathlib.Path,
    watches: DirectoryWatches,
    source: RuleSource,
    there: str,
    path: str,
) -> None:
    (tmp_path / there).mkdir(parents=True)
    sources = SourceCgroups(tmp_path)
    sources.watches = watches
    cgroups = sources.resolve([source], {source.name: [UID]})
    if there == path:
        assert cgroups
        (tmp_path / path).rmdir()
    else:
        assert not cgroups
        (tmp_path / path).mkdir(parents=True)
    # Directories on the way appear one after the other, and each is reported.
    for _ in range(5):
        if bool(cgroups) is (there != path):
            break
        assert select.select([watches], [], [], 30)[0]
        watches.drain()
        cgroups = sources.resolve([source], {source.name: [UID]})
    assert bool(cgroups) is (there != path)
    (tmp_path / "unrelated").mkdir()
    watches.drain()


class RecordedWatches:
    """Which directories are to be watched."""

    def __init__(self, root: pathlib.Path) -> None:
        self.directories: set[str] = set()
        self._root = root

    def watch_only(self, directories: set[pathlib.Path]) -> bool:
        self.directories = {str(one.relative_to(self._root)) for one in directories}
        return False


class ConfirmedPods(PodsCgroup):
    """A process of a pod has shown it, outside of the usual places."""

    @property
    def confirmed(self) -> pathlib.Path | None:
        assert self._root is not None
        return self._root / "own.slice" / "deep" / "kubepods"


@pytest.mark.parametrize(
    ("sources", "directories"),
    [
        ([RuleSource("exact", "/")], set()),
        ([RuleSource("exact", "/own.slice/deep")], {"own.slice"}),
        ([RuleSource("subtree", "/own.slice/none/at/all")], {"own.slice"}),
        ([RuleSource("exact", "/none/at/all"), RuleSource("exact", "/other")], {"."}),
        ([unit("a.service")], {".", "own.slice", "system.slice"}),
        (
            [PODS],
            {"own.slice/deep", "own.slice/deep/kubepods", "own.slice/deep/kubepods/burstable"},
        ),
    ],
)
def test_only_directories_that_sources_depend_on_are_watched(
    tmp_path: pathlib.Path, sources: list[RuleSource], directories: set[str]
) -> None:
    for path in ("own.slice/deep/kubepods/burstable", "system.slice/a.service", "docker/b"):
        (tmp_path / path).mkdir(parents=True)
    made = SourceCgroups(tmp_path, ConfirmedPods(tmp_path))
    watches = RecordedWatches(tmp_path)
    made.watches = cast(DirectoryWatches, watches)
    made.resolve(sources, {one.name: [UID] for one in sources})
    assert watches.directories == directories


class LateWatches:
    """Watches before whose start a cgroup appears."""

    def __init__(self, appearing: pathlib.Path) -> None:
        self.calls = 0
        self._appearing = appearing

    def watch_only(self, directories: set[pathlib.Path]) -> bool:
        self.calls += 1
        self._appearing.mkdir(exist_ok=True)
        return self.calls == 1


def test_cgroup_that_appears_before_its_directory_is_watched_is_found(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "system.slice").mkdir()
    late = LateWatches(tmp_path / "system.slice" / "a.service")
    sources = SourceCgroups(tmp_path)
    sources.watches = cast(DirectoryWatches, late)
    assert list(sources.resolve([unit("a.service")], {})) == ["a.service"]
    assert late.calls == 2


def test_directory_that_is_created_again_is_watched_again(
    tmp_path: pathlib.Path, watches: DirectoryWatches
) -> None:
    directory = tmp_path / "a"
    directory.mkdir()
    assert watches.watch_only({directory})
    assert not watches.watch_only({directory})
    directory.rmdir()
    assert not watches.watch_only({directory})
    directory.mkdir()
    assert watches.watch_only({directory})
    watches.drain()
    (directory / "b").mkdir()
    assert select.select([watches], [], [], 30)[0]
    assert not watches.watch_only(set())


def test_link_to_a_directory_is_no_cgroup(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere" / "a.service").mkdir(parents=True)
    (tmp_path / "system.slice").symlink_to(tmp_path / "elsewhere")
    assert found(tmp_path, unit("a.service")) == []
