"""What `podgate status` prints without an agent, and what of it is red."""

import msgspec
import pytest

from agent.admin.report import HookStatus
from agent.operate.cli.output import Signal
from agent.operate.cli.views import pinned_status
from agent.operate.pinned import exposures, findings
from agent.operate.pinned.report import PinnedStatus
from tests.agent.operate.cli.reports import PINNED
from tests.agent.operate.cli.views.recorded import RecordedScreen

OPEN = msgspec.structs.replace(PINNED.exposures[0], is_open=True, text="All gates are open.")


def shown(**changes: object) -> RecordedScreen:
    screen = RecordedScreen()
    status: PinnedStatus = msgspec.structs.replace(PINNED, **changes)
    status = msgspec.structs.replace(status, findings=findings.find(status))
    pinned_status.show(screen, status)
    return screen


@pytest.mark.parametrize(
    ("changes", "start", "signal"),
    [
        ({}, "broken: No agent responds, and 1 gate is in force, heartbeat 40 s", Signal.DANGER),
        ({}, "degraded: All gates open in 23 h", Signal.CAUTION),
        ({"exposures": [OPEN]}, "open: All gates are open.", Signal.DANGER),
        ({"kubelet": None}, "degraded: Kubelet not identified.", Signal.CAUTION),
        ({}, "open: No program is attached at veth55f0: everything passes", Signal.DANGER),
        ({}, "degraded: Hook connect4 does not work: it has no link", Signal.CAUTION),
        ({}, "degraded: Strict unavailable, falling back to enforce: no relay", Signal.CAUTION),
        ({"is_off": True}, "open: podgate is off by 'podgate off --node': all", Signal.DANGER),
        ({"gates": []}, "No pod has a gate.", None),
        ({}, "agent: its last heartbeat was 40s ago", None),
        ({"heartbeat_age_seconds": None}, "agent: none has run since", None),
        ({"heartbeat_age_seconds": 0.0}, "agent: its last heartbeat was 0s ago", None),
        ({}, "relay: does not serve; ports of pods: 1", None),
        ({}, "packets dropped before an interface is chosen: 3 by tunnel", None),
    ],
)
def test_what_is_open_is_red(changes: dict[str, object], start: str, signal: Signal | None) -> None:
    assert shown(**changes).signal_of(start) is signal


def test_red_is_first() -> None:
    signals = [signal for _, signal in shown().lines if signal]
    assert signals == [Signal.DANGER] * 2 + [Signal.CAUTION] * 3


def test_gate_without_a_program_is_red() -> None:
    cells = shown().cells
    assert cells["ATTACHED", "tcx"] is Signal.SAFE
    assert cells["ATTACHED", "no"] is Signal.DANGER
    assert cells["MODE", "audit"] is Signal.CAUTION


@pytest.mark.parametrize("is_followed", [True, False])
def test_kubelet_whose_restarts_are_not_followed_has_a_note(*, is_followed: bool) -> None:
    (line,) = [
        text
        for text, _ in shown(is_kubelet_followed=is_followed).lines
        if text.startswith("kubelet: ")
    ]
    assert line.endswith("; its restarts are not followed") is not is_followed


def test_hook_that_works_and_a_relay_without_ports_need_no_line() -> None:
    relay = msgspec.structs.replace(PINNED.relay, ports=0)
    lines = shown(hooks=[HookStatus(name="connect4", problem=None)], relay=relay).lines
    assert not [text for text, _ in lines if "Hook" in text or text.startswith("relay:")]


@pytest.mark.parametrize(
    ("what", "is_open", "is_reported"),
    [
        (exposures.DECLARED_PORTS, True, False),
        (exposures.DECLARED_PORTS, False, True),
        (PINNED.exposures[0].what, True, True),
    ],
)
def test_kubelet_is_reported_unless_its_ports_are_open_already(
    what: str, *, is_open: bool, is_reported: bool
) -> None:
    exposure = msgspec.structs.replace(PINNED.exposures[0], what=what, is_open=is_open)
    lines = shown(kubelet=None, exposures=[exposure]).lines
    found = [text for text, _ in lines if text.startswith("degraded: Kubelet not identified")]
    assert bool(found) is is_reported
