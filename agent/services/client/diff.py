"""Differences between whole states, for programs that install what the APIs publish."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclasses.dataclass(frozen=True)
class Change(Generic[KeyT, ValueT]):
    """What differs from the last state. False if nothing does."""

    added: dict[KeyT, ValueT]
    changed: dict[KeyT, ValueT]
    """With the new values."""
    removed: dict[KeyT, ValueT]
    """With the last values."""

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


class Differ(Generic[KeyT, ValueT]):
    """The last state that was applied: full states in, changes out.

    A program that cannot apply a change calls `compare` again later, with the newest state; what it
    has applied it passes to `accept`:

        change = differ.compare(state.by_name())
        apply(change)
        differ.accept()
    """

    def __init__(self, applied: Mapping[KeyT, ValueT] | None = None) -> None:
        """applied: what is installed already; nothing if None."""
        self._applied = dict(applied or {})
        self._compared = self._applied

    @property
    def applied(self) -> Mapping[KeyT, ValueT]:
        """The state that was accepted last."""
        return self._applied

    def compare(self, state: Mapping[KeyT, ValueT]) -> Change[KeyT, ValueT]:
        """The change from the state that was accepted last. Values are compared by `==`, and must
        not be modified afterwards."""
        before = self._applied
        self._compared = dict(state)
        return Change(
            added={key: value for key, value in state.items() if key not in before},
            # Unchanged services are the same objects in the next state of a client, and to compare
            # messages takes much longer.
            changed={
                key: value
                for key, value in state.items()
                if key in before and before[key] is not value and before[key] != value
            },
            removed={key: value for key, value in before.items() if key not in state},
        )

    def accept(self) -> None:
        """The state that was compared last is applied."""
        self._applied = self._compared
