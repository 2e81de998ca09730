"""What clients of PodInfo get of one pod, and since when each of its conditions is as it is.

Protobuf is imported and a pod is encoded when the first client reads it (`pod_messages`).
"""

import dataclasses
import datetime
import functools
from collections.abc import Mapping

from agent.api.podinfo import merge
from agent.api.podinfo.merge import PodRecord, ReportedCondition


@dataclasses.dataclass(frozen=True)
class ObservedPod:
    """One pod. Two that are equal have equal messages."""

    identity: tuple[str, str, str]
    """The runtime's uid, the namespace and the name."""
    uids: tuple[str, ...]
    """All uids by which clients may request it."""
    is_static: bool
    mirror_uid: str
    deletion_timestamp: str
    conditions: tuple[tuple[ReportedCondition, datetime.datetime | None], ...]
    """The effective ones, and when each was first seen as it is now."""

    @property
    def order(self) -> tuple[str, str, str]:
        """The sort key in the list."""
        uid, namespace, name = map(merge.utf8_safe, self.identity)
        return namespace, name, uid

    @functools.cached_property
    def content(self) -> bytes:
        """The bytes of a response that has nothing but this pod."""
        from agent.api.podinfo import pod_messages

        return pod_messages.encode(self)


class PodObserver:
    """Observes one pod, and remembers when each condition was first seen as it is now."""

    def __init__(self) -> None:
        self._first_seen: Mapping[ReportedCondition, datetime.datetime | None] = {}

    def observe(self, record: PodRecord, now: datetime.datetime) -> ObservedPod:
        first_seen: dict[ReportedCondition, datetime.datetime | None] = {}
        for reported in merge.reported_conditions(record):
            is_received = merge.is_received(record, reported.source)
            first_seen[reported] = self._first_seen.get(reported) or (now if is_received else None)
        self._first_seen = first_seen
        return ObservedPod(
            record.identity,
            record.uids,
            record.is_static,
            record.mirror_uid,
            record.reports.deletion_timestamp or "",
            tuple((one, first_seen[one]) for one in merge.effective_conditions(record)),
        )
