"""The search for the kubelet, on a /proc and a cgroup tree of files."""

import asyncio
import errno
import os
import pathlib
from typing import Any

import pytest
import structlog

from agent.kubelet import search as kubelet_search
from agent.kubelet.identity import KubeletIdentity
from agent.kubelet.search import AmbiguousKubeletError, KubeletCgroup, KubeletCgroupError
from agent.linux.procfs import Procfs
from agent.logs import Event
from agent.settings import ByCgroup, ByProcess, KubeletSetting

NODE_NET = "net:[1]"
INITIAL_USER = "user:[1]"
ALL_CAPABILITIES = (1 << 41) - 1
CAP_SYS_ADMIN = 1 << 21
CONTAINER = "0123456789abcdef" * 4
UNIT = "/system.slice/kubelet.service"


class Node:
    """A /proc and a cgroup v2 tree that tests fill with processes."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.proc = directory / "proc"
        self.cgroup2 = directory / "cgroup"
        self.cgroup2.mkdir()
        self._add_namespaces("self", NODE_NET, "pid:[1]")

    def _add_namespaces(
        self, pid: int | str, net: str, pids: str, user: str = INITIAL_USER
    ) -> None:
        spaces = self.proc / str(pid) / "ns"
        spaces.mkdir(parents=True)
        for kind, space in (("net", net), ("pid", pids), ("user", user)):
            (spaces / kind).symlink_to(space)

    def add(
        self,
        pid: int,
        name: str = "kubelet",
        cgroup: str = UNIT,
        *,
        capabilities: int = ALL_CAPABILITIES,
        user: str = INITIAL_USER,
        other_cgroup: str = "/elsewhere",
        net: str = NODE_NET,
        pids: str = "pid:[1]",
        state: str = "S",
        parent: int = 1,
        port: int | None = None,
        started: int | None = None,
    ) -> None:
        self._add_namespaces(pid, net, pids, user)
        directory = self.proc / str(pid)
        (directory / "comm").write_text(name[:15] + "\n")
        rest = " ".join(["0"] * 17 + [str(started or pid)] + ["0"] * 10)
        (directory / "stat").write_text(f"{pid} ({name[:15]}) {state} {parent} {rest}\n")
        # Root's, whatever its capabilities are.
        status = f"Name:\t{name}\nUid:\t0\t0\t0\t0\nCapEff:\t{capabilities:016x}\n"
        (directory / "status").write_text(status)
        (directory / "cgroup").write_text(f"5:devices:{other_cgroup}\n0::{cgroup}\n")
        self._listen(directory, port)
        self.cgroup_directory(cgroup)
        with (self.cgroup2 / cgroup.lstrip("/") / "cgroup.procs").open("a") as procs:
            procs.write(f"{pid}\n")

    def _listen(self, directory: pathlib.Path, port: int | None) -> None:
        (directory / "fd").mkdir()
        (directory / "net").mkdir()
        lines = ["  sl  local_address rem_address   st ..."]
        for number, (at, state) in enumerate([(port, "0A"), (9, "01")]):
            if at is not None:
                local = f"00000000:{at:04X}"
                middle = "00000000:0000 00:00 00:0 0 0 0"
                lines.append(f"  {number}: {local} {middle.replace(' ', f' {state} ', 1)} 77{at} 1")
                (directory / "fd" / str(number)).symlink_to(f"socket:[77{at}]")
        (directory / "net" / "tcp6").write_text("\n".join(lines) + "\n")

    def remove(self, pid: int) -> None:
        for path in sorted((self.proc / str(pid)).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        (self.proc / str(pid)).rmdir()

    def cgroup_directory(self, path: str) -> pathlib.Path:
        directory = self.cgroup2 / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def find(
        self,
        setting: KubeletSetting | None = None,
        current: KubeletCgroup | None = None,
        *,
        scans: bool = True,
    ) -> KubeletCgroup | None:
        return kubelet_search.find(
            setting or ByProcess(),
            procfs=Procfs(self.proc),
            cgroup2=self.cgroup2,
            current=current,
            scans=scans,
        )

    def found_pid(
        self,
        setting: KubeletSetting | None = None,
        current: KubeletCgroup | None = None,
    ) -> int | None:
        found = self.find(setting, current)
        return None if found is None else found.pid


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    made = Node(tmp_path)
    made.add(1, "systemd", "/init.scope")
    return made


def test_kubelet_is_found_by_its_name(node: Node) -> None:
    node.add(700)
    found = node.find()
    assert found is not None
    assert found.path == UNIT
    assert found.id == node.cgroup_directory(UNIT).stat().st_ino
    assert found.pid == 700
    assert not found.is_shared


def test_node_without_a_kubelet_has_none(node: Node) -> None:
    assert node.find() is None


def test_name_with_spaces_and_brackets_is_parsed(node: Node) -> None:
    node.add(700, "a) S (b")
    assert node.found_pid(ByProcess("a) S (b")) == 700


def test_long_name_is_cut_as_by_the_kernel(node: Node) -> None:
    node.add(700, "the-kubelet-of-this-node")
    assert node.found_pid(ByProcess("the-kubelet-of-this-node")) == 700


@pytest.mark.parametrize(
    "lack",
    [
        {"capabilities": ALL_CAPABILITIES & ~CAP_SYS_ADMIN},
        {"user": "user:[2]"},
        {"net": "net:[2]"},
        {"state": "Z"},
        {"cgroup": "/kubepods.slice/kubepods-pod1.slice/x"},
        {"cgroup": "/kubelet.slice/kubelet-kubepods.slice/x"},
        {"cgroup": f"/docker/{CONTAINER}"},
        {"cgroup": f"/default/{CONTAINER}/below"},
        {"cgroup": "/k8s.io/web"},
        {"cgroup": f"/system.slice/cri-containerd-{CONTAINER}.scope"},
        {"cgroup": f"/system.slice/crio-{CONTAINER}.scope"},
        {"cgroup": f"/machine.slice/libpod-{CONTAINER}.scope/container"},
        {"cgroup": "/system.slice/systemd-nspawn@web.service/payload"},
        {"cgroup": "/lxc.payload.web"},
        {"other_cgroup": f"/kubepods/besteffort/pod1/{CONTAINER}"},
    ],
    ids=lambda lack: "-".join(map(str, *lack.items())),
)
def test_process_of_the_same_name_is_not_the_kubelet(node: Node, lack: dict[str, Any]) -> None:
    node.add(600, **{"cgroup": "/elsewhere", **lack}, port=10250)
    assert node.find() is None
    node.add(700)
    assert node.found_pid() == 700


def test_port_selects_between_processes_of_one_name(node: Node) -> None:
    node.add(600, cgroup="/system.slice/other.service", port=81)
    node.add(700, port=12345)
    assert node.found_pid(ByProcess("kubelet", 12345)) == 700
    assert node.found_pid(ByProcess("kubelet", 9)) is None  # connected, not listening


def test_process_on_the_default_port_is_chosen(node: Node) -> None:
    node.add(600, cgroup="/system.slice/other.service")
    node.add(700, port=10250)
    assert node.found_pid() == 700


def test_ambiguous_processes_are_rejected(node: Node) -> None:
    node.add(600, cgroup="/system.slice/other.service")
    node.add(700)
    with pytest.raises(AmbiguousKubeletError, match=r"several processes .*\(pids 600, 700\)"):
        node.find()


def test_several_processes_on_the_default_port_are_ambiguous(node: Node) -> None:
    node.add(600, cgroup="/system.slice/other.service", port=10250)
    node.add(700, port=10250)
    with pytest.raises(AmbiguousKubeletError, match=r"several processes"):
        node.find()


def test_current_kubelet_stays_when_another_process_takes_its_name(node: Node) -> None:
    node.add(700)
    current = node.find()
    node.add(800, cgroup="/system.slice/other.service")
    assert node.found_pid(current=current) == 700


def test_process_on_the_default_port_replaces_a_current_kubelet_that_does_not_serve(
    node: Node,
) -> None:
    node.add(600, cgroup="/system.slice/other.service")
    current = node.find()
    node.add(700, port=10250)
    assert node.found_pid(current=current) == 700


def test_others_are_found_only_by_a_scan_while_the_current_kubelet_runs(node: Node) -> None:
    node.add(700)
    current = node.find()
    node.add(600, cgroup="/system.slice/other.service", port=10250)
    found = [node.find(current=current, scans=scans) for scans in (False, True)]
    assert [one and one.pid for one in found] == [700, 600]
    node.remove(700)
    assert node.find(current=current, scans=False) == found[1]


def test_current_kubelet_stays_when_another_process_serves_as_well(node: Node) -> None:
    node.add(700, port=10250)
    current = node.find()
    node.add(600, cgroup="/system.slice/other.service", port=10250)
    assert node.found_pid(current=current) == 700


def test_reused_pid_is_a_new_process(node: Node) -> None:
    node.add(700)
    current = node.find()
    node.remove(700)
    node.add(700, cgroup="/system.slice/other.service", started=7000)
    node.add(800, cgroup="/system.slice/kubelet2.service", port=10250)
    assert node.found_pid(current=current) == 800


def test_pid_of_a_new_process_is_no_reason_to_choose_it(node: Node) -> None:
    node.add(700)
    current = node.find()
    node.remove(700)
    node.add(700, started=7000)
    node.add(800, started=6000)
    assert node.found_pid(current=current) == 800


def test_child_with_the_same_name_is_not_a_second_kubelet(node: Node) -> None:
    node.add(700)
    node.add(800, parent=700)
    found = node.find()
    assert found is not None
    assert found.pid == 700
    assert not found.is_shared


def test_oldest_process_of_one_cgroup_is_the_kubelet_whichever_serves(node: Node) -> None:
    node.add(800, port=10250, started=800)
    node.add(900, started=700)
    assert node.found_pid() == 900


def test_kubelet_with_a_shared_cgroup_is_marked(node: Node) -> None:
    node.add(600, "rke2")
    node.add(700, parent=600)
    found = node.find()
    assert found is not None
    assert found.is_shared


def test_kubelet_in_one_process_with_the_api_server_is_marked(node: Node) -> None:
    node.add(700, "k3s-server")
    found = node.find(ByProcess("k3s-server"))
    assert found is not None
    assert found.is_shared


@pytest.mark.parametrize("name", ["k3s-server", "k3s-agent", "k3s", "kubelite", "microshift"])
def test_process_that_the_kubelet_is_a_part_of_is_found_by_its_port(node: Node, name: str) -> None:
    """Without a setting; k3s has other processes of its name."""
    node.add(600, name, cgroup="/system.slice/other.service")
    assert node.find() is None
    node.add(700, name, port=10250)
    found = node.find()
    assert found is not None
    assert (found.pid, found.is_shared) == (700, True)


def test_process_that_is_the_kubelet_alone_comes_first(node: Node) -> None:
    node.add(600, "k3s-server", cgroup="/system.slice/k3s.service", port=10250)
    node.add(700)
    assert node.found_pid() == 700


@pytest.mark.parametrize(
    "setting", [ByProcess("hyperkube"), ByProcess("kubelet", 12345)], ids=["name", "port"]
)
def test_only_what_is_set_is_looked_for(node: Node, setting: ByProcess) -> None:
    node.add(600, "k3s-server", port=10250)
    assert node.find(setting) is None


def test_children_of_the_kubelet_do_not_count_as_sharing(node: Node) -> None:
    node.add(700)
    node.add(800, "mount", parent=700)
    node.add(801, "mount.nfs", parent=800)
    # It has just exited.
    node.add(802, "mount", parent=700)
    node.remove(802)
    found = node.find()
    assert found is not None
    assert not found.is_shared


def test_root_cgroup_is_rejected(node: Node) -> None:
    node.add(700, cgroup="/")
    with pytest.raises(
        KubeletCgroupError, match=r"kubelet \(pid 700\) is in the root cgroup.*unit"
    ):
        node.find()


@pytest.mark.parametrize(
    "below",
    [
        "kubepods",
        "kubepods.slice",
        "deeper/kubelet-kubepods.slice",
        "kubepods-besteffort-pod0f2ab7a6_8c5a_4b5d_9d5d_0d9f5b0f0a11.slice",
        "pod0f2ab7a6-8c5a-4b5d-9d5d-0d9f5b0f0a11",
        "cri-containerd-0123456789abcdef.scope",
    ],
)
def test_cgroup_with_pods_below_is_rejected(node: Node, below: str) -> None:
    node.add(700, cgroup="/kubelet")
    node.cgroup_directory(f"/kubelet/{below}")
    name = below.rpartition("/")[2]
    with pytest.raises(KubeletCgroupError, match=rf"/kubelet also holds pods \({name}\)"):
        node.find()


def test_cgroup_with_very_many_below_is_rejected(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet_search, "_MAX_CGROUPS", 3)
    node.add(700)
    for name in ("a", "b", "c"):
        node.cgroup_directory(f"{UNIT}/{name}")
    assert node.found_pid() == 700
    node.cgroup_directory(f"{UNIT}/d")
    with pytest.raises(KubeletCgroupError, match=r"holds pods \(more than 3 cgroups\)"):
        node.find()


def test_own_cgroups_below_are_accepted(node: Node) -> None:
    node.add(700)
    node.cgroup_directory(f"{UNIT}/podgate-is-no-pod")
    node.cgroup_directory(f"{UNIT}/helpers")
    assert node.found_pid() == 700


@pytest.mark.parametrize("space", [{"net": "net:[9]"}, {"pids": "pid:[9]"}], ids=["net", "pid"])
@pytest.mark.parametrize("below", ["", "/sub"])
def test_container_process_in_its_cgroup_is_rejected(
    node: Node, space: dict[str, str], below: str
) -> None:
    """Where the runtime uses cgroup v1, containers stay in the v2 cgroup in which they started."""
    node.add(700)
    node.add(900, "nginx", UNIT + below, **space)  # type: ignore[arg-type]
    with pytest.raises(KubeletCgroupError, match="process 900 of a container"):
        node.find()


def test_cgroup_outside_of_the_agents_namespace_is_rejected(node: Node) -> None:
    node.add(700, cgroup="/../../system.slice/kubelet.service")
    with pytest.raises(KubeletCgroupError, match="outside of podgate's cgroup namespace"):
        node.find()


def test_unmounted_cgroup_is_rejected(node: Node) -> None:
    node.add(700)
    (node.cgroup2 / UNIT[1:] / "cgroup.procs").unlink()
    (node.cgroup2 / UNIT[1:]).rmdir()
    with pytest.raises(KubeletCgroupError, match="is not below"):
        node.find()


def test_removed_cgroup_is_none(node: Node) -> None:
    node.add(700)
    (node.proc / "700" / "cgroup").write_text(f"0::{UNIT} (deleted)\n")
    assert node.find() is None


def test_named_cgroup_is_used_with_any_process(node: Node) -> None:
    node.add(700, "anything", "/fixed")
    found = node.find(ByCgroup("/fixed"))
    assert found is not None
    assert (found.path, found.pid, found.is_shared) == ("/fixed", 700, False)


def test_named_cgroup_may_be_empty_or_missing(node: Node) -> None:
    assert node.find(ByCgroup("/fixed")) is None
    node.cgroup_directory("/fixed")
    found = node.find(ByCgroup("/fixed"))
    assert found is not None
    assert found.pid is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EOPNOTSUPP])
def test_shortage_of_the_agent_is_no_cgroup_without_processes(
    node: Node, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A threaded cgroup has no list of processes."""
    node.add(700, "anything", "/fixed")
    read_bytes = pathlib.Path.read_bytes

    def fail(path: pathlib.Path) -> bytes:
        if path.name == "cgroup.procs":
            raise OSError(number, os.strerror(number))
        return read_bytes(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", fail)
    if number == errno.EOPNOTSUPP:
        found = node.find(ByCgroup("/fixed"))
        assert found is not None
        assert found.pid is None
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            node.find(ByCgroup("/fixed"))


def test_named_cgroup_of_pods_is_rejected(node: Node) -> None:
    node.cgroup_directory("/kubepods.slice")
    with pytest.raises(KubeletCgroupError, match=r"/kubepods.slice is a pod's"):
        node.find(ByCgroup("/kubepods.slice"))


def test_named_cgroup_of_pods_is_rejected_before_it_exists(node: Node) -> None:
    with pytest.raises(KubeletCgroupError, match=r"/kubepods.slice is a pod's"):
        node.find(ByCgroup("/kubepods.slice"))


def test_named_cgroup_of_a_container_is_used(node: Node) -> None:
    """On a node that is itself a container, such as kind's."""
    node.add(700, cgroup=f"/docker/{CONTAINER}/kubelet.service")
    assert node.found_pid(ByCgroup(f"/docker/{CONTAINER}/kubelet.service")) == 700


def test_kubelet_of_a_named_cgroup_may_have_namespaces_of_its_own(node: Node) -> None:
    """With all that it starts."""
    node.add(700, cgroup="/fixed", pids="pid:[5]")
    node.add(701, "mount", "/fixed/below", parent=700, pids="pid:[5]")
    assert node.found_pid(ByCgroup("/fixed")) == 700


def test_named_cgroup_with_processes_only_below_holds_none_of_a_container(node: Node) -> None:
    node.add(701, "mount", "/fixed/below")
    found = node.find(ByCgroup("/fixed"))
    assert found is not None
    assert found.pid is None
    node.add(900, "nginx", "/fixed/web", net="net:[9]")
    with pytest.raises(KubeletCgroupError, match="process 900 of a container"):
        node.find(ByCgroup("/fixed"))


def test_new_process_in_the_same_cgroup_is_no_change() -> None:
    assert KubeletCgroup("/a", 5, False, 700, 1) == KubeletCgroup("/a", 5, False, 800, 2)
    assert KubeletCgroup("/a", 5, False, 700, 1) != KubeletCgroup("/a", 6, False, 700, 1)


async def test_problems_are_sentences_and_changes_are_published_once(node: Node) -> None:
    published: list[KubeletCgroup | None] = []
    identity = KubeletIdentity(
        ByProcess(), published.append, procfs=Procfs(node.proc), cgroup2=node.cgroup2
    )
    with structlog.testing.capture_logs() as lines:
        await identity.refresh()
        await identity.refresh()
        assert published == [None]
        assert identity.problem == (
            "no process named kubelet on this node; set --kubelet, and run with hostPID."
        )
        node.add(700)
        await asyncio.gather(identity.refresh())
        await identity.refresh()
        assert published == [None, identity.current]
        assert identity.problem == ""
        node.cgroup_directory(f"{UNIT}/kubepods")
        await identity.refresh()
        await identity.refresh()
        assert published[2:] == [None]
        assert "also holds pods" in identity.problem
        assert identity.is_rejected
    assert [line["event"] for line in lines] == [
        Event.KUBELET_NOT_FOUND,
        Event.KUBELET_FOUND,
        Event.KUBELET_NOT_FOUND,
    ]


async def test_rejection_of_the_first_kubelet_is_published(node: Node) -> None:
    published: list[KubeletCgroup | None] = []
    identity = KubeletIdentity(
        ByProcess(), published.append, procfs=Procfs(node.proc), cgroup2=node.cgroup2
    )
    node.add(700, cgroup="/")
    await identity.refresh()
    await identity.refresh()
    assert published == [None]
    assert identity.is_rejected
    node.remove(700)
    await identity.refresh()
    assert published == [None, None]
    assert not identity.is_rejected


async def test_ambiguous_processes_are_no_rejection(node: Node) -> None:
    """What is admitted may stay, since one of them may be the kubelet that is starting."""
    identity = KubeletIdentity(
        ByProcess(), lambda _: None, procfs=Procfs(node.proc), cgroup2=node.cgroup2
    )
    node.add(600, cgroup="/system.slice/other.service")
    node.add(700)
    assert await identity.refresh() is None
    assert "several processes" in identity.problem
    assert not identity.is_rejected


async def test_host_without_cgroup_v2_is_one_sentence(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.kubelet.identity.cgroup2_mount", lambda: None)
    identity = KubeletIdentity(ByProcess(), lambda _: None, procfs=Procfs(node.proc))
    assert await identity.refresh() is None
    assert identity.problem == (
        "cgroup v2 is not mounted; the kubelet is identified by its cgroup."
    )


async def test_mounts_are_read_until_cgroup_v2_is_found(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with a hundred pods has hundreds of them, and the search is repeated all the time."""
    mounts = [None, node.cgroup2]
    monkeypatch.setattr("agent.kubelet.identity.cgroup2_mount", lambda: mounts.pop(0))
    identity = KubeletIdentity(ByProcess(), lambda _: None, procfs=Procfs(node.proc))
    node.add(700)
    assert await identity.refresh() is None
    for _ in range(3):
        assert await identity.refresh() is not None
    assert mounts == []


async def test_found_kubelet_is_logged_once(node: Node) -> None:
    identity = KubeletIdentity(
        ByProcess(), lambda _: None, procfs=Procfs(node.proc), cgroup2=node.cgroup2
    )
    node.add(700)
    with structlog.testing.capture_logs() as lines:
        await identity.refresh()
        await identity.refresh()
    found = [line for line in lines if line["event"] is Event.KUBELET_FOUND]
    assert [(line["pid"], line["cgroup"]) for line in found] == [(700, UNIT)]


async def test_all_processes_are_read_for_a_minute_and_then_twice_a_minute(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second kubelet may start with the first one, and hardly later."""
    now = 1000.0
    identity = KubeletIdentity(
        ByProcess(),
        lambda _: None,
        procfs=Procfs(node.proc),
        cgroup2=node.cgroup2,
        now=lambda: now,
    )
    scanned: list[float] = []

    def find(*arguments: Any, scans: bool, **named: Any) -> KubeletCgroup | None:
        if scans:
            scanned.append(now - 1000)
        return search(*arguments, scans=scans, **named)

    search = kubelet_search.find
    monkeypatch.setattr(kubelet_search, "find", find)
    node.add(700)
    for _ in range(13):
        await identity.refresh()
        now += 10
    assert scanned == [0, 10, 20, 30, 40, 50, 80, 110]


async def test_kubelet_is_overdue_after_longer_than_a_restart_takes(node: Node) -> None:
    now = 1000.0
    published: list[tuple[bool, bool]] = []
    identity = KubeletIdentity(
        ByProcess(),
        lambda found: published.append((found is not None, identity.is_overdue)),
        procfs=Procfs(node.proc),
        cgroup2=node.cgroup2,
        now=lambda: now,
    )
    node.add(700)
    await identity.refresh()
    node.remove(700)
    for seconds in (1, 13, 1, 1, 100):
        now += seconds
        await identity.refresh()
    node.add(800)
    await identity.refresh()
    found_in_time, missing, overdue = (True, False), (False, False), (False, True)
    assert published == [found_in_time, missing, overdue, found_in_time]
