"""The machine's apt sources are understood in both of their formats, and reasons name no host."""

import pytest

from tests.kernels import suites

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.invalid/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://mirror.invalid/debian-security
Suites: bookworm-security
Components: main
"""
ONE_LINE = """\
# deb http://off.invalid/debian bookworm main
deb [signed-by=/usr/share/keyrings/k.gpg] http://mirror.invalid/debian bookworm main contrib
deb http://mirror.invalid/debian-security bookworm-security main
"""
FOREIGN = "Types: deb\nURIs: https://other.invalid/apt\nSuites: nodistro\nComponents: main\n"


@pytest.mark.parametrize("own", [DEB822, ONE_LINE])
def test_mirrors_are_those_of_debian(own: str) -> None:
    found = suites.read_mirrors([FOREIGN, own])
    assert found.of("trixie") == "http://mirror.invalid/debian"
    assert found.of("bullseye-security") == "http://mirror.invalid/debian-security"


def test_machine_without_debian_s_sources_has_no_mirror() -> None:
    assert suites.read_mirrors([FOREIGN]) == suites.Mirrors(None, None)
