"""A clock that moves by what a command sleeps."""

from collections.abc import Callable


class MovedClock:
    """at: what happens meanwhile, by seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], None]] = {}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in sorted(self.at):
            if at <= self.now:
                self.at.pop(at)()
