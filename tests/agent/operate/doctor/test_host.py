"""Findings about the machine that a test machine does not have by itself."""

import ipaddress
import pathlib

import pytest

from agent.admin import finding
from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.errors import PreflightError
from agent.linux.node_routes import DeviceRoute
from agent.linux.rtnetlink import Link
from agent.operate.doctor import checks, host_network, kernel, programs
from agent.operate.doctor.results import Passed, Result
from bpf import errors, hooks, program_specs
from bpf.attachments import Direction
from bpf.neighbours import BesideHook, Chain


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


ALONE = "No program of others is on podgate's hooks of the root cgroup."
SERVICE = "a connection to an address of a service that is translated there is"


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        (
            [],
            [Passed("chain-order", "Each attached gate (0 interfaces) is first in its chain.")],
        ),
        (
            [Chain(7, True, (), ("b",)), Chain(8, False, (), ("a", "b")), Chain(8, False, (), ())],
            [
                Passed(
                    "chain-order",
                    "Each attached gate (2 interfaces, 1 of them by a filter) is first in its "
                    "chain; Programs a, b after it.",
                )
            ],
        ),
        (
            [
                Chain(1, True, ("a",), ()),
                Chain(2, True, (), ()),
                Chain(10**6, True, ("b", "a"), ()),
            ],
            [
                finding.found(
                    kinds.GATE_NOT_FIRST,
                    f"{text}, and packets that it accepts pass no gate",
                )
                for text in (
                    "Program a runs before the gate on lo",
                    "Programs b, a runs before the gate on interface 1000000",
                )
            ],
        ),
    ],
)
def test_gate_is_the_first_of_its_chain(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    chains: list[Chain],
    expected: list[Result],
) -> None:
    def of_direction(_: object, direction: Direction) -> list[Chain]:
        return chains if direction is next(iter(Direction)) else []

    monkeypatch.setattr("bpf.neighbours.chains", of_direction)
    monkeypatch.setattr("bpf.neighbours.beside_hook", lambda *_: BesideHook())
    assert list(programs.check(tmp_path)) == [*expected, Passed("hooks-beside", ALONE)]


@pytest.mark.parametrize(
    ("name", "beside", "text"),
    [
        (
            "hook_connect4",
            BesideHook(("b", "a"), ()),
            "Programs a, b at the root cgroup, next to podgate's hooks: each may reject, none can "
            "admit what another rejects. Programs a, b before podgate's connect hook: "
            f"{SERVICE} rejected at once (EPERM).",
        ),
        (
            "hook_connect6",
            BesideHook((), ("a",)),
            "Program a at the root cgroup, next to podgate's hooks: each may reject, none can "
            "admit what another rejects. Program a after podgate's connect hook: "
            f"{SERVICE} dropped by the gate and times out.",
        ),
        (
            "hook_sendmsg4",
            BesideHook((), ("a",)),
            "Program a at the root cgroup, next to podgate's hooks: each may reject, none can "
            "admit what another rejects.",
        ),
    ],
)
def test_programs_beside_hooks_are_named_with_what_they_change(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    name: str,
    beside: BesideHook,
    text: str,
) -> None:
    def of_hook(_: int, __: object, hook: program_specs.HookSpec) -> BesideHook:
        return beside if hook.name == name else BesideHook()

    monkeypatch.setattr("bpf.neighbours.chains", lambda *_: [])
    monkeypatch.setattr("bpf.neighbours.beside_hook", of_hook)
    assert list(programs.check(tmp_path))[1:] == [Passed("hooks-beside", text)]


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
    taken = program_specs.HOOKS[0]

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
