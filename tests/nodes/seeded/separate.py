"""Tests that show which node they are on, for tests/nodes/test_units.py; not collected."""

import os
import signal
import socket

import pytest

from tests.nodes import node

pytestmark = pytest.mark.kernel


def show_node() -> None:
    assert node.current is not None
    print("NODE", node.current.path, os.readlink("/proc/self/ns/net"))  # noqa: T201


def test_first_of_the_file() -> None:
    show_node()


def test_own_node(own_node: None) -> None:
    show_node()
    socket.create_server(("127.0.0.1", 4711)).detach()


def test_another_own_node(own_node: None) -> None:
    show_node()
    with socket.create_server(("127.0.0.1", 4711)):
        pass


def test_second_of_the_file() -> None:
    show_node()


def test_that_kills_its_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_killed_process() -> None:
    show_node()


@pytest.mark.timeout(1)
def test_that_hangs() -> None:
    signal.pause()


def test_after_one_that_hung() -> None:
    show_node()
