"""The text that Prometheus scrapes, from the collectors of all components."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

import prometheus_client
from prometheus_client import registry

from agent.app.metric_levels import LevelledCollector
from agent.settings import MetricsLevel


class RefreshedCollector(registry.Collector, Protocol):
    """A collector whose figures take longer to read than the event loop can wait."""

    async def refresh(self) -> None: ...


class Exporter:
    """A registry of one agent."""

    def __init__(
        self,
        *,
        refreshed: Iterable[RefreshedCollector],
        collectors: Iterable[registry.Collector],
        level: MetricsLevel = MetricsLevel.POD,
    ) -> None:
        """level: of what metrics of pods are."""
        self._registry = prometheus_client.CollectorRegistry()
        self._refreshed: list[RefreshedCollector] = []
        for collector in refreshed:
            self.add_refreshed(collector)
        for other in collectors:
            self.add(other)
        prometheus_client.ProcessCollector(registry=self._registry)
        self._levelled: registry.Collector = self._registry
        if level is not MetricsLevel.POD:
            self._levelled = LevelledCollector(self._registry, level)

    def add(self, collector: registry.Collector) -> None:
        self._registry.register(collector)

    def add_refreshed(self, collector: RefreshedCollector) -> None:
        self._refreshed.append(collector)
        self.add(collector)

    async def render(self) -> bytes:
        """The text exposition of everything."""
        await asyncio.gather(*(collector.refresh() for collector in self._refreshed))
        return prometheus_client.generate_latest(self._levelled)
