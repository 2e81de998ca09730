"""Encodes pods for the kubelet's pods API: whole v1.Pods in protobuf, when a client reads them.

A pod is the kubelet's own object while its pods API reports it, else the API server's, with all
fields but managed ones; with two changes: its conditions are those of PodInfo, and a static pod has
the runtime's uid, as with the kubelet. Without a cluster it is the manifest, with the addresses
that podgate has confirmed; after a restart without both servers it has the fields that podgate
stores.
"""

import contextlib
import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

import msgspec

from agent.api.podinfo import merge, pod_encoding
from agent.api.podinfo.merge import PodRecord, ReportedCondition
from agent.api.podinfo.records import PodRecords
from agent.kube.objects import ApiPod, WholePod
from agent.kubelet import kubelet_pb2, pods_api_reading

_Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class PodObject:
    """One pod, encoded. identity: the same v1.Pod with nothing but uid, namespace and name, as the
    kubelet reports a deleted one."""

    content: bytes
    identity: bytes


class PodObjects:
    """The node's pods, each encoded once per change, and only for clients that read it."""

    def __init__(self, records: PodRecords) -> None:
        self.encoded = 0
        """Pods that were encoded so far."""
        self._records = records
        self._kept: dict[str, tuple[PodRecord, WholePod | None, PodObject]] = {}

    def uids(self) -> list[str]:
        """Of all pods, in the kubelet's order (pkg/kubelet/apis/pods/server.go: by uid)."""
        uids = sorted(self._records.uids())
        for uid in self._kept.keys() - set(uids):
            del self._kept[uid]
        return uids

    def of(self, uid: str) -> PodObject | None:
        """The pod with the runtime's uid, or None."""
        record = self._records.of(uid)
        if record is None:
            self._kept.pop(uid, None)
            return None
        whole = found.whole if (found := record.reports.newest_status) else None
        kept = self._kept.get(uid)
        if kept and kept[0] == record and kept[1] is whole:
            return kept[2]
        self.encoded += 1
        encoded = _encode(record)
        self._kept[uid] = record, whole, encoded
        return encoded

    def find(self, uid: str) -> PodObject | None:
        """The pod with this uid, the API's of a static pod as well; None if there is none."""
        if found := self.of(uid):
            return found
        for other in self._records.uids():
            record = self._records.of(other)
            if record and uid and record.mirror_uid == uid:
                return self.of(other)
        return None


def _encode(record: PodRecord) -> PodObject:
    uid, namespace, name = record.identity
    metadata = {"name": name, "namespace": namespace, "uid": uid}
    found = record.reports.newest_status
    if found and found.whole and not found.whole.is_json:
        content = _changed(found.whole.content, record)
    else:
        pod = _json(found, record)
        pod["metadata"] = {**pod.get("metadata", {}), **metadata, **_deletion(record)}
        status = pod.setdefault("status", {})
        status["conditions"] = _conditions(status.get("conditions") or (), record)
        content = pod_encoding.encode("Pod", pod)
    return PodObject(content, pod_encoding.encode("Pod", {"metadata": metadata}))


def _json(found: ApiPod | None, record: PodRecord) -> _Json:
    """The pod as the API's JSON."""
    if found and found.whole:
        # It was decoded before, as an `ApiPod`.
        whole: _Json = msgspec.json.decode(found.whole.content)
        return whole
    if found:
        stored: _Json = msgspec.to_builtins(found)
        return stored
    assert record.pod is not None  # a record has at least one source
    pod = {
        "metadata": {"labels": dict(record.pod.labels)},
        "spec": {"hostNetwork": record.pod.host_network},
        **record.pod.manifest,
    }
    # Nothing else of a manifest's status is a fact.
    ips = [{"ip": one} for one in record.addresses]
    pod["status"] = {"podIP": ips[0]["ip"], "podIPs": ips} if ips else {}
    return pod


def _changed(content: bytes, record: PodRecord) -> bytes:
    """The kubelet's object with the effective conditions; fields that podgate does not know stay.

    Without a change it stays as it is, byte by byte.
    """
    pod = kubelet_pb2.Pod.FromString(content)
    before = [pods_api_reading.condition(one) for one in pod.status.conditions]
    after = _conditions(before, record)
    deleted_at = _seconds(record.reports.deletion_timestamp)
    is_deleted_later = deleted_at is not None and not pod.metadata.HasField("deletionTimestamp")
    if after == before and not is_deleted_later:
        return content
    if is_deleted_later:
        pod.metadata.deletionTimestamp.seconds = deleted_at
    del pod.status.conditions[:]
    for one in after:
        pod.status.conditions.add().MergeFromString(pod_encoding.encode("PodCondition", one))
    return bytes(pod.SerializeToString())


def _deletion(record: PodRecord) -> _Json:
    deleted_at = record.reports.deletion_timestamp
    return {"deletionTimestamp": deleted_at} if deleted_at else {}


def _conditions(before: Iterable[_Json], record: PodRecord) -> list[_Json]:
    """The effective conditions; those that the object has as they are, with all their fields."""
    effective = {one.type: one for one in merge.effective_conditions(record)}
    kept = [
        one if _is_same(one, reported) else _condition(reported)
        for one in before
        if (reported := effective.pop(one.get("type", ""), None))
    ]
    return kept + [_condition(reported) for reported in effective.values()]


def _is_same(condition: _Json, reported: ReportedCondition) -> bool:
    texts = [condition.get(name, "") for name in ("status", "reason", "message")]
    return texts == [reported.status, reported.reason, reported.message] and (
        _seconds(condition.get("lastTransitionTime")) == _seconds(reported.last_transition_time)
    )


def _condition(reported: ReportedCondition) -> _Json:
    return {
        "type": reported.type,
        "status": reported.status,
        "reason": reported.reason,
        "message": reported.message,
        "lastProbeTime": reported.last_probe_time or None,
        "lastTransitionTime": reported.last_transition_time or None,
    }


def _seconds(text: str | None) -> int | None:
    """A time of RFC 3339 in whole seconds; None if there is none."""
    with contextlib.suppress(ValueError):
        if text:
            return int(datetime.datetime.fromisoformat(text).timestamp())
    return None
