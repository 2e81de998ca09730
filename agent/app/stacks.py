"""Where each task of the event loop waits and what each thread does, as text for a bug report."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType

_NAMES = {
    CoroutineType: ("cr_frame", "cr_await"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
}
"""Of the frame, and of what it awaits."""


def text() -> str:
    """A line for each task and thread: its name, and its calls with the innermost last."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        (
            *(_line("task", task.get_name(), _awaited(task)) for task in tasks),
            *(
                _line("thread", names.get(ident, str(ident)), _called(frame))
                for ident, frame in sorted(sys._current_frames().items())
            ),
        )
    )


def _line(kind: str, name: str, frames: Iterator[FrameType]) -> str:
    return f"{kind} {name}: {' > '.join(map(_place, frames))}\n"


def _awaited(task: "asyncio.Task[object]") -> Iterator[FrameType]:
    """From the task's coroutine to the last one that it awaits; `Task.get_stack` has the first
    alone."""
    awaitable: object = task.get_coro()
    while names := _NAMES.get(type(awaitable)):
        frame, awaitable = (getattr(awaitable, name) for name in names)
        if frame is not None:
            yield frame


def _called(frame: FrameType) -> Iterator[FrameType]:
    return (one for one, _ in reversed(list(traceback.walk_stack(frame))))


def _place(frame: FrameType) -> str:
    """Such as "agent/tasks.py:12 start"."""
    file = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
