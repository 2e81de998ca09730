"""What a trace shows against a journey of the page."""

from tests.tracing.journeys import Journey, Step, problems
from tests.tracing.trace import Entry

PROCESS = Step("agent/strict/process.py", ": `RelayChannel` reads it.")
LAUNCHER = Step("agent/strict/launcher.py", ": passes it on.")
STATS = Step("agent/strict/stats.py", ": `ConnectionStats` adds it up.")

READ = ("agent/strict/process.py", "RelayChannel._read")
HANDLE = ("agent/strict/process.py", "RelayChannel._handle")
ADD = ("agent/strict/stats.py", "ConnectionStats.add")
TASK = ("agent/tasks.py", "_watch")


def found(steps: list[Step], *stacks: tuple[tuple[str, str], ...]) -> list[str]:
    entries = [Entry(number, stack) for number, stack in enumerate(stacks, start=1)]
    named = {step.path for step in steps}
    return problems(Journey([steps], named), steps, entries)


def test_steps_in_the_order_of_the_trace_are_right() -> None:
    assert found([PROCESS, STATS], (HANDLE, READ, TASK), (ADD, HANDLE, READ, TASK)) == []


def test_one_entry_can_pass_two_steps() -> None:
    assert found([PROCESS, STATS], (ADD, HANDLE, READ)) == []


def test_step_without_a_part_in_the_journey_is_named() -> None:
    assert found([PROCESS, LAUNCHER, STATS], (HANDLE, READ), (ADD, HANDLE, READ)) == [
        "agent/strict/launcher.py is not passed after the step before it."
    ]


def test_steps_in_another_order_are_named() -> None:
    assert found([STATS, PROCESS], (HANDLE, READ), (ADD,)) == [
        "`RelayChannel` of agent/strict/process.py is not passed after the step before it."
    ]


def test_function_that_is_not_passed_is_named() -> None:
    step = Step("agent/strict/stats.py", ": `keep_only` of `ConnectionStats`.")
    assert found([step], (ADD,)) == ["`keep_only` of agent/strict/stats.py is not passed."]


def test_file_through_which_a_step_is_called_is_on_the_page() -> None:
    assert found([STATS], (ADD, HANDLE, TASK)) == [
        "agent/strict/stats.py is called through agent/strict/process.py, which the journey does "
        "not name."
    ]
