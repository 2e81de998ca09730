"""The lab's pods can be reached at once, and nothing of a lab is left after it."""

import socket
import subprocess

import pytest

from agent.lab import lab as labs
from agent.lab.lab import Lab
from tests.kernel import links

pytestmark = pytest.mark.kernel

PORT = 8080


def names() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def addresses() -> str:
    return subprocess.run(
        ["ip", "-oneline", "address", "show"], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])
def test_pods_reach_each_other_and_the_host_reaches_them_at_once(lab: Lab, bridged: bool) -> None:
    first = lab.add_pod("first", 1, bridged=bridged)
    second = lab.add_pod("second", 2, bridged=bridged)
    for address, family in ((first.ipv4, socket.AF_INET), (first.ipv6, socket.AF_INET6)):
        with first.listen(PORT, family), second.open_socket(family, socket.SOCK_STREAM) as client:
            client.connect((address, PORT))
            socket.create_connection((address, PORT), timeout=1).close()


def test_nothing_is_left_of_a_lab(no_relays: None) -> None:
    before = names()
    with links.pair() as others:
        with Lab() as lab:
            lab.add_pod("routed", 1)
            bridged = lab.add_pod("bridged", 2, bridged=True)
            lab.add_pod("removed", 3)
            lab.remove_pod("removed")
            assert names() == before | {"pgrouted", "pgbridged", labs.BRIDGE, *others}
            # As when a pod's namespace ends by itself.
            links.ip(f"link del {bridged.interface}")
        assert names() == before | set(others)
        assert list((labs.LAB_DIRECTORY / "netns").iterdir()) == []
        assert "198.18." not in addresses()
        assert "fd00:18:" not in addresses()


def test_lab_whose_pods_ended_by_themselves_can_end(lab: Lab) -> None:
    pod = lab.add_pod("ended", 1)
    links.ip(f"link del {pod.interface}")
    lab.remove_pod("ended")
    lab.add_pod("ended", 1)
    links.ip(f"link del {pod.interface}")
