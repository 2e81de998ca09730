"""When the containers of one pod started, and which of them have passed their startup probe."""

from probes.engine.targets import ProbedContainer


class ContainerStarts:
    """By container: the newest run that was seen."""

    __slots__ = ("_at", "_ids")

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._at: dict[str, tuple[float, float]] = {}

    def record(self, container: ProbedContainer) -> None:
        """This run has started. A startup probe that is added or changed later does not change
        that (KEP-6318)."""
        self._ids[container.probes.name] = container.container_id

    def has(self, container: ProbedContainer) -> bool:
        """Whether this run has started at any time."""
        return self._ids.get(container.probes.name, "") == container.container_id != ""

    def on_loop(self, container: ProbedContainer, *, wall: float, loop: float) -> float:
        """When the container started, on the loop's clock, which has no steps of the wall clock:
        fixed when first seen. wall, loop: the time now on both clocks."""
        name = container.probes.name
        recorded = self._at.get(name)
        if recorded is None or recorded[0] != container.started_at:
            age = wall - container.started_at
            recorded = self._at[name] = (container.started_at, loop - age)
        return recorded[1]
