"""Verification of the network namespaces that runtimes report."""

import asyncio
import ipaddress
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from agent.cri import sandbox_netns
from agent.cri.models import SandboxDetails
from agent.cri.sandbox_netns import SandboxNetns
from agent.lab.lab import Lab
from agent.linux.pod_network import PodNetworkReader


def _details(info: dict[str, str], ips: Iterable[str] = ("198.18.1.1",)) -> SandboxDetails:
    return SandboxDetails(
        host_network=False, ips=tuple(ipaddress.ip_address(ip) for ip in ips), info=info
    )


@pytest.mark.kernel
def test_namespace_with_the_pods_addresses_is_accepted(lab: Lab) -> None:
    pod = lab.add_pod("one", 1)
    located = _locate([pod.netns.path], pod.addresses)
    assert (located.netns, located.problem) == (pod.netns, "")


@pytest.mark.kernel
def test_namespace_of_another_pod_is_rejected(lab: Lab) -> None:
    one, other = lab.add_pod("one", 1), lab.add_pod("other", 2)
    located = _locate([other.netns.path], one.addresses)
    assert located.netns is None
    assert f"{one.ipv4}, {one.ipv6} is on no interface of {other.netns.path}" in located.problem


@pytest.mark.kernel
def test_namespace_with_one_of_two_addresses_is_rejected(lab: Lab) -> None:
    pod = lab.add_pod("one", 1)
    located = _locate([pod.netns.path], [pod.addresses[0], "fd00:18::99"])
    assert located.netns is None
    assert "fd00:18::99 is on no interface" in located.problem


@pytest.mark.kernel
def test_host_namespace_and_other_files_are_rejected(lab: Lab, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.touch()
    own = _locate([f"/proc/{os.getpid()}/ns/net"], ["198.18.0.1"])
    assert own.netns is None
    assert "the host's network namespace" in own.problem
    for path in (file, tmp_path / "nothing"):
        located = _locate([str(path)], ["198.18.0.1"])
        assert located.netns is None
        assert str(path) in located.problem


@pytest.mark.kernel
def test_next_path_is_tried_after_a_mismatch(lab: Lab) -> None:
    one, other = lab.add_pod("one", 1), lab.add_pod("other", 2)
    located = _locate(["/run/netns/gone", other.netns.path, one.netns.path], one.addresses)
    assert (located.netns, located.problem) == (one.netns, "")


@pytest.mark.kernel
def test_namespace_that_vanishes_while_it_is_read_has_no_number(
    lab: Lab, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mount goes first; the file that it was mounted on is there for a moment longer."""
    pod = lab.add_pod("one", 1)
    file = tmp_path / "file"
    file.touch()
    opened: list[str] = []

    def open_left_over(path: str, flags: int) -> int:
        opened.append(path)
        return os.open(file, flags)

    monkeypatch.setattr("agent.linux.pod_network.os", _OsWithOther(open_left_over))

    network = asyncio.run(PodNetworkReader().read(pod.netns))
    assert opened == [pod.netns.path]
    assert (network.nsid, network.interfaces) == (None, ())


class _OsWithOther:
    """The module os, but for open."""

    def __init__(self, other: Callable[[str, int], int]) -> None:
        self.open = other

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _locate(paths: Iterable[str], ips: Iterable[object]) -> SandboxNetns:
    spec = {"linux": {"namespaces": [{"type": "network", "path": path} for path in paths]}}
    details = _details({"info": json.dumps({"runtimeSpec": spec})}, [str(ip) for ip in ips])

    return asyncio.run(sandbox_netns.locate(details))
