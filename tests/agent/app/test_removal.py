"""podgate's removal: which steps are made, in which order, and what a failed one leaves out."""

import pathlib
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from agent import state_files
from agent.app import network_managers, removal
from agent.app.removal import IncompleteError
from agent.cni import state as cni_state
from agent.cni.installer import CniInstaller
from agent.default_deny import table as default_deny_table
from agent.default_deny.table import DefaultDenyError
from agent.linux import locks
from agent.pods import off_marks
from agent.services.proxy import iptables, ipvs, nftables
from agent.strict import orphans, veth_pair
from bpf import cleanup, pins
from bpf.cleanup import Removed

OPENED = ["mark in the kernel", "programs", "default-deny table"]
DETACHED = [*OPENED, "marks", "state of podgate-cni", "interfaces of relays", "relay"]
PROXY = ["nftables", "iptables", "ipvs"]
UNPINNED = [*DETACHED, "podgate-cni", "pinned objects", "exclusion", *PROXY]
REMOVED = [*UNPINNED, "no marks", "pins", "services"]


class Node:
    """Records the steps that are made on it; those in `failing` raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path) -> None:
        self.steps: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.held: set[pathlib.Path] = set()
        """Directories whose locks others hold."""
        self.binary_kept: list[bool] = []
        self.root = directory / "bpffs"
        self.run_directory = directory / "run"
        self.run_directory.mkdir()
        self.services_state = directory / "services.json"
        self.plugin: Node | None = self
        step, later = self._step, self._later
        monkeypatch.setattr(off_marks, "put_in_kernel", step("mark in the kernel"))
        monkeypatch.setattr(cleanup, "detach_everything", step("programs", Removed(2, 3)))
        monkeypatch.setattr(default_deny_table, "remove", later("default-deny table"))
        monkeypatch.setattr(off_marks, "put", step("marks"))
        monkeypatch.setattr(cni_state, "retire", step("state of podgate-cni"))
        monkeypatch.setattr(orphans, "find", self._find)
        monkeypatch.setattr(veth_pair, "remove_everything", later("interfaces of relays"))
        monkeypatch.setattr(network_managers, "remove_exclusion", step("exclusion"))
        monkeypatch.setattr(nftables, "remove", later("nftables"))
        monkeypatch.setattr(iptables, "remove", later("iptables"))
        monkeypatch.setattr(ipvs, "remove", later("ipvs"))
        monkeypatch.setattr(off_marks, "remove", step("no marks"))
        monkeypatch.setattr(state_files, "remove", step("services"))
        monkeypatch.setattr(locks, "is_held", self.held.__contains__)
        self.kill = later("relay")
        self.remove_objects = step("pinned objects", 4)
        self.remove_everything = step("pins")

    def _step(self, name: str, result: object = None) -> Callable[..., Any]:
        def make(*_: object) -> object:
            self.steps.append(name)
            if error := self.failing.get(name):
                raise error
            return result

        return make

    def _later(self, name: str) -> Callable[..., Awaitable[Any]]:
        step = self._step(name)

        async def make() -> object:
            return step()

        return make

    async def _find(self) -> list["Node"]:
        """The relays, of which there is one."""
        if error := self.failing.get("relays"):
            raise error
        return [self]

    def remove(self, *, is_binary_kept: bool) -> None:
        """podgate-cni."""
        self.binary_kept.append(is_binary_kept)
        self._step("podgate-cni")()

    @property
    def installation(self) -> pins.Pins:
        return cast(pins.Pins, self)

    def clean(self) -> Removed:
        return removal.remove(
            self.run_directory,
            self.installation,
            plugin=cast(CniInstaller | None, self.plugin),
            is_binary_kept=True,
            services_state=self.services_state,
        )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Node:
    return Node(monkeypatch, tmp_path)


def test_pods_are_open_before_anything_is_written_and_nothing_is_left(node: Node) -> None:
    assert node.clean() == Removed(6, 3)
    assert node.steps == REMOVED
    assert node.binary_kept == [True]
    assert not node.run_directory.exists()


def test_without_the_plugin_the_run_directory_stays(node: Node) -> None:
    node.plugin = None
    node.clean()
    assert node.steps == [step for step in REMOVED if step != "podgate-cni"]
    assert node.run_directory.exists()


@pytest.mark.parametrize(
    ("step", "removed"),
    [
        ("programs", Removed(0, 0)),
        ("default-deny table", Removed(2, 3)),
        ("marks", Removed(2, 3)),
        ("interfaces of relays", Removed(2, 3)),
    ],
)
def test_each_step_is_tried_after_one_that_failed(node: Node, step: str, removed: Removed) -> None:
    node.failing[step] = DefaultDenyError("It is broken.")
    progress = removal.detach(node.run_directory, node.installation)
    assert (progress.removed, progress.problems) == (removed, ["It is broken."])
    left_out = ["relay"] if step == "interfaces of relays" else []
    assert node.steps == [one for one in DETACHED if one not in left_out]
    with pytest.raises(IncompleteError, match=r"^It is broken\.$"):
        progress.check()


@pytest.mark.parametrize(
    "step",
    ["podgate-cni", "pinned objects", "exclusion", "nftables", "iptables", "no marks", "pins"],
)
def test_step_that_fails_is_named_and_the_run_directory_stays(node: Node, step: str) -> None:
    node.failing |= {step: OSError("no room"), "services": OSError()}
    with pytest.raises(IncompleteError) as caught:
        node.clean()
    assert str(caught.value) == "no room. OSError."
    assert node.steps == REMOVED
    assert node.run_directory.exists()


def test_marks_that_only_help_may_be_missing(node: Node) -> None:
    for step in ("mark in the kernel", "state of podgate-cni"):
        node.failing[step] = OSError("read-only file system")
    assert node.clean() == Removed(6, 3)
    assert node.steps == REMOVED


def test_interfaces_of_relays_are_removed_though_these_are_not_found(node: Node) -> None:
    node.failing["relays"] = OSError("no /proc")
    progress = removal.detach(node.run_directory, node.installation)
    assert progress.problems == ["no /proc"]
    assert node.steps == DETACHED[:-1]


@pytest.mark.parametrize("place", ["run_directory", "root"])
def test_node_stays_off_beside_an_agent(node: Node, place: str) -> None:
    node.held.add(getattr(node, place))
    with pytest.raises(IncompleteError) as caught:
        node.clean()
    assert str(caught.value) == (
        "podgate's objects are removed, but an agent still runs: another process holds the lock of "
        f"{node.run_directory} or {node.root}. It stays off; stop it, and repeat this command."
    )
    assert node.steps == UNPINNED
    assert node.run_directory.exists()


def test_services_stay_beside_a_proxy(node: Node) -> None:
    node.held.add(node.run_directory / "proxy")
    with pytest.raises(IncompleteError) as caught:
        node.clean()
    assert str(caught.value) == ("podgate proxy is running, so its services stay; stop it first.")
    assert node.steps == [step for step in REMOVED if step not in PROXY]
