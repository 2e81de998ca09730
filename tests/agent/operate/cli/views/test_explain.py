"""What `podgate explain` prints, and what of it is red."""

import msgspec
import pytest

from agent.operate.cli.output import Signal
from agent.operate.cli.views import explain
from agent.operate.explain import model
from tests.agent.operate.cli.kernel_reports import DROPPED, POD
from tests.agent.operate.cli.views.recorded import RecordedScreen


def flow(**changes: object) -> RecordedScreen:
    screen = RecordedScreen()
    explain.show_flow(screen, msgspec.structs.replace(DROPPED, **changes))
    return screen


def pod(**changes: object) -> RecordedScreen:
    screen = RecordedScreen()
    explain.show_pod(screen, msgspec.structs.replace(POD, **changes))
    return screen


@pytest.mark.parametrize(
    ("verdict", "signal"),
    [
        (model.PASS, Signal.SAFE),
        (model.WOULD_DROP, Signal.CAUTION),
        (model.DROP, Signal.DANGER),
    ],
)
def test_verdict_is_first_and_has_its_colour(verdict: str, signal: Signal) -> None:
    text, found = flow(verdict=verdict).lines[0]
    assert text.startswith(f"{verdict.upper()}: restic (pid 1454)")
    assert text.endswith("to shop/web-7f9c6b5d4f-2xkqp (198.18.1.7), tcp port 8080")
    assert found is signal


def test_target_without_a_pod_or_port_is_its_address() -> None:
    target = msgspec.structs.replace(DROPPED.target, pod="", namespace="", port=0, protocol="icmp")
    assert flow(target=target).lines[0][0].endswith(" to 198.18.1.7, icmp")


def test_agent_that_is_not_alive_is_a_caution() -> None:
    assert flow().signal_of("Agent dead, last heartbeat 40 s ago: ") is Signal.CAUTION
    alive = msgspec.structs.replace(DROPPED.agent, state="alive", heartbeat_age_seconds=None)
    assert flow(agent=alive).signal_of("Agent alive, no heartbeat yet: ") is None


def test_program_with_another_verdict_is_a_caution() -> None:
    assert flow().signal_of("The gate's program, run on the same facts, has the same") is None
    other = flow(confirmation="the program passes it")
    text = "The gate's program as a check: the program passes it."
    assert other.signal_of(text) is Signal.CAUTION
    assert not [text for text, _ in flow(confirmation="").lines if "gate's program" in text]


def test_reason_of_a_verdict_is_named_if_there_is_one() -> None:
    assert flow().signal_of("Decided by: ") is None
    (text,) = [text for text, _ in flow(reason="").lines if text.startswith("Decided by")]
    assert ", reason" not in text
    assert ". Connect(2) fails with EPERM" in text


def test_pods_checks_have_the_colour_of_their_state() -> None:
    screen = pod()
    assert screen.signal_of("shop/db-0: not all is well") is Signal.DANGER
    states = {state: signal for (column, state), signal in screen.cells.items()}
    assert states == {"ok": Signal.SAFE, "unknown": Signal.CAUTION, "problem": Signal.DANGER}
    assert pod(is_well=True).signal_of("shop/db-0: all is well") is Signal.SAFE


def test_answer_without_an_agent_has_a_note() -> None:
    assert pod(from_agent=False).signal_of("No agent responds: read from") is Signal.CAUTION
    assert not [text for text, _ in pod().lines if "No agent" in text]
