"""Tests that leave something on their node, for tests/nodes/test_leftovers.py; not collected."""

import contextlib
import os
import socket
import subprocess

import pytest

from agent.lab import lab as labs
from bpf import maps, syscalls
from bpf.map_specs import CONFIG
from tests.nodes import node

pytestmark = pytest.mark.kernel


class Leaving:
    def test_descriptor(self) -> None:
        os.open("/proc/self/status", os.O_RDONLY)

    def test_socket(self) -> None:
        sock = socket.create_server(("127.0.0.1", 4711))
        os.dup(sock.fileno())
        sock.close()

    def test_link(self) -> None:
        _run("ip", "link", "add", "seeded0", "type", "veth", "peer", "name", "seeded1")

    def test_network_namespace(self) -> None:
        _run("ip", "netns", "add", "seeded")

    def test_pin(self) -> None:
        directory = labs.BPFFS / "seeded"
        directory.mkdir()
        with contextlib.closing(maps.Map(maps.create(CONFIG), CONFIG)) as made:
            syscalls.pin(made.fd, str(directory / "map"))

    def test_cgroup(self) -> None:
        assert node.current is not None
        (node.current.cgroup / "seeded").mkdir()

    def test_nftables_table(self) -> None:
        _run("nft", "add", "table", "inet", "seeded")

    def test_process(self) -> None:
        os.posix_spawnp("sleep", ["sleep", "4711"], os.environ)

    def test_nothing(self) -> None:
        """Where the others have left all that, if they share a node."""


class TestOnSharedNode(Leaving):
    pass


@pytest.mark.usefixtures("own_node")
class TestOnOwnNode(Leaving):
    pass


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
