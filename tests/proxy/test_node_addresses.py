"""The addresses that packets of the node leave from."""

import subprocess

import pytest

from agent.services.proxy import node_addresses


@pytest.mark.kernel
def test_primary_addresses_are_the_default_routes_sources(isolated: None) -> None:
    selection = node_addresses.parse(["primary"])
    try:
        for arguments in (
            ("link", "add", "way-out", "type", "veth", "peer", "name", "way-in"),
            ("link", "set", "way-out", "up"),
            ("link", "set", "way-in", "up"),
            ("address", "add", "198.19.7.1/24", "dev", "way-out"),
            ("address", "add", "198.19.7.2/24", "dev", "way-out"),
            ("address", "add", "fd00:18:7::1/64", "dev", "way-out", "nodad"),
        ):
            subprocess.run(["ip", *arguments], check=True)
        assert selection.read() == ()
        subprocess.run(["ip", "route", "add", "default", "dev", "way-out"], check=True)
        assert [str(it) for it in selection.read()] == ["198.19.7.1"]
        subprocess.run(["ip", "-6", "route", "add", "default", "dev", "way-out"], check=True)
        assert [str(it) for it in selection.read()] == ["198.19.7.1", "fd00:18:7::1"]
    finally:
        subprocess.run(["ip", "link", "del", "way-out"], check=True)
