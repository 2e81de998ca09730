"""Findings about the machine that a test machine does not have by itself."""

import ipaddress
import pathlib

import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.errors import PreflightError
from agent.linux.node_routes import DeviceRoute
from agent.linux.rtnetlink import Link
from agent.operate.doctor import checks, host_network, kernel, programs
from agent.operate.doctor.results import Passed
from bpf import abi, errors, hooks


async def test_without_privileges_nothing_else_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def fail() -> None:
        raise PreflightError("bpf(2) is not allowed; run as root")

    monkeypatch.setattr("agent.app.preflight.check", fail)
    report = await checks.run(tmp_path, tmp_path)
    (one,) = report.findings
    assert (one.kind, one.sentence) == (kinds.PRIVILEGES_MISSING.name, "bpf(2) is not allowed.")
    assert one.remedy == "Run as root."


def test_kernel_without_cookies_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "netns_cookie", lambda: None)
    found = next(iter(kernel._hooks()))
    assert isinstance(found, Finding)
    assert found.kind == kinds.COOKIES_MISSING.name


def test_programs_of_others_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def fail(*_: object) -> None:
        raise errors.BpfError(1, "not allowed")

    monkeypatch.setattr("bpf.neighbours.chains", fail)
    (found,) = programs.check(tmp_path)
    assert isinstance(found, Finding)
    assert found.kind == kinds.PROGRAMS_UNREADABLE.name
    assert "not allowed" in found.sentence


async def test_tun_that_carries_traffic_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def links() -> list[Link]:
        return [Link(7, "tun0", kind="tun", is_ethernet=False)]

    async def routes(_: object, __: int) -> list[DeviceRoute]:
        return [DeviceRoute(ipaddress.ip_network("198.18.5.0/24"), is_on_link=False)]

    monkeypatch.setattr("agent.linux.rtnetlink.read", links)
    monkeypatch.setattr("agent.linux.node_routes.NodeRoutes.routes_by", routes)
    found = await host_network._tun_interfaces()
    assert isinstance(found, Finding)
    assert found.kind == kinds.TUN_ROUTES.name
    assert "tun0 (routes to 198.18.5.0/24)" in found.sentence


def test_hook_that_another_program_has_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = abi.HOOKS[0]

    def describe(_: int, hook: object) -> str:
        return "program 7 is attached alone; remove it" if hook is taken else ""

    monkeypatch.setattr(hooks, "describe_exclusive", describe)
    (found,) = kernel._hooks()
    assert isinstance(found, Finding)
    assert found.kind == kinds.HOOK_TAKEN.name
    assert found.sentence == f"Hook {taken.name}: program 7 is attached alone."
    assert found.remedy == "Remove it."
    monkeypatch.setattr(hooks, "describe_exclusive", lambda *_: "")
    (passed,) = kernel._hooks()
    assert isinstance(passed, Passed)


async def test_tun_with_many_routes_names_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def links() -> list[Link]:
        return [Link(7, "tun0", kind="tun", is_ethernet=False)]

    async def routes(_: object, __: int) -> list[DeviceRoute]:
        networks = [ipaddress.ip_network(f"198.18.{number}.0/24") for number in range(5)]
        return [DeviceRoute(network, is_on_link=False) for network in networks]

    monkeypatch.setattr("agent.linux.rtnetlink.read", links)
    monkeypatch.setattr("agent.linux.node_routes.NodeRoutes.routes_by", routes)
    found = await host_network._tun_interfaces()
    assert isinstance(found, Finding)
    assert "tun0 (routes to 198.18.0.0/24, 198.18.1.0/24, 198.18.2.0/24) count" in found.sentence
