"""Source processes of dropped traffic: the kernel's aggregate, with cgroup paths."""

import asyncio
import contextlib
import datetime
import pathlib
import time

import msgspec
import structlog

from agent import batches, state_files, tasks
from agent.admin.observations import ObservedPod
from agent.drops.merging import observed_pod, pod_uid
from agent.linux.cgroups import cgroup_paths
from agent.logs import Event
from agent.pods.changes import Subscription
from agent.pods.object_labels import ObjectLabels
from agent.pods.store import PodStore
from bpf.drop_sources import DropSource, DropSources

log = structlog.get_logger(__name__)

NAMES_FILE = "drop_sources.json"
"""In the directory of saved state."""

# A cgroup may be gone a moment after its only call, and then its path is lost.
_PERIOD_SECONDS = 2.0
# The kernel sends an event with each new source (src/verdict.h), but for those that it suppresses
# since it has just sent others: these are in the look after the next.
_LOOKS_PER_HINT = 2
# Without any hint.
_LONG_PERIOD_SECONDS = 30.0
# A full aggregate may cost one hundredth of a CPU, however fast sources come and go.
_REST_PER_LOOK = 100
_MAX_NAMES = 20_000
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 47: "gre", 50: "esp", 58: "icmp", 132: "sctp"}
NO_SOCKET = "(no socket: the kernel)"
GONE = "(gone)"


class CgroupName(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a cgroup was called when it was first seen. pod: the pod that it belongs to."""

    cgroup: int
    path: str
    pod: ObservedPod | None = None

    @property
    def pod_name(self) -> str:
        """As "namespace/name", empty without a pod."""
        return f"{self.pod.namespace}/{self.pod.name}" if self.pod else ""


def saved_names(path: pathlib.Path) -> list[CgroupName]:
    """The names that an agent saved; none if there is no such file. Blocks."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return msgspec.json.decode(path.read_bytes(), type=list[CgroupName])
    return []


class SourceProcesses:
    """Follows the aggregate; names survive a restart in a file below the run directory."""

    def __init__(
        self,
        drop_sources: DropSources,
        *,
        state: pathlib.Path,
        store: PodStore,
        labels: ObjectLabels,
    ) -> None:
        """state: the file for the names; labels: of namespaces."""
        self._labels = labels
        self._drop_sources = drop_sources
        self._state = state
        self._store = store
        self._names: dict[int, str] = {0: NO_SOCKET}
        self._pods: dict[int, ObservedPod] = {}
        self._woken = asyncio.Event()
        # A source's pod may be reported after its first drop.
        self._changed_pods = store.desired.subscribe(Subscription(self._woken))

    def hint(self) -> None:
        """There may be a new source."""
        self._woken.set()

    async def run(self) -> None:
        """Name new sources soon after their first drop, until cancelled."""
        await asyncio.to_thread(self._restore)
        looks = 1
        while True:
            started = time.monotonic()
            await batches.in_thread(self._look)
            seconds = time.monotonic() - started
            looks -= 1
            await asyncio.sleep(max(_PERIOD_SECONDS, seconds * _REST_PER_LOOK))
            if not looks:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(tasks.next_tick(_LONG_PERIOD_SECONDS)):
                        await self._woken.wait()
            if self._woken.is_set():
                self._woken.clear()
                self._changed_pods.take()
                looks = _LOOKS_PER_HINT
            looks = max(looks, 1)

    def read(self) -> list[tuple[DropSource, CgroupName]]:
        """All drop sources with their cgroups, the busiest first. Blocks for some milliseconds."""
        found = sorted(self._drop_sources.read(), key=lambda seen: -seen.count)
        self.learn({seen.cgroup for seen in found})
        return [(seen, self.source(seen.cgroup)) for seen in found]

    def lost(self) -> int:
        return self._drop_sources.lost()

    def cgroup_path(self, cgroup: int) -> str:
        """The path of a cgroup by its id, as far as it is known by now."""
        return self._names.get(cgroup, f"(cgroup {cgroup})")

    def source(self, cgroup: int) -> CgroupName:
        """The cgroup's name, and the pod that it belongs to, as far as they are known by now."""
        return CgroupName(cgroup, self._names.get(cgroup, GONE), self._pods.get(cgroup))

    def _look(self) -> None:
        cgroups = self._drop_sources.cgroups()
        if len(self._names) > _MAX_NAMES:
            self._names = {id: name for id, name in self._names.items() if id in cgroups}
            self._names[0] = NO_SOCKET
            self._pods = {id: pod for id, pod in self._pods.items() if id in cgroups}
        if self.learn(cgroups):
            self._save()

    def learn(self, cgroups: set[int]) -> bool:
        """Name the cgroups that have no name yet; whether there were any. May block for some ms."""
        unnamed = cgroups - self._names.keys()
        if unnamed:
            # Ids are not used again: the name of a cgroup that is gone is never found.
            self._names |= dict.fromkeys(unnamed, GONE) | cgroup_paths(unnamed)
        # A pod may be reported later than its first packet is sent.
        found = {}
        for cgroup in cgroups - self._pods.keys():
            uid = pod_uid(self._names[cgroup])
            if uid and (state := self._store.get(uid)):
                found[cgroup] = observed_pod(state.pod, self._labels.snapshot())
        self._pods |= found
        return bool(unnamed or found)

    def _restore(self) -> None:
        saved = state_files.read(
            self._state, list[CgroupName], failure=Event.SOURCE_NAMES_UNREADABLE
        )
        self._names |= {name.cgroup: name.path for name in saved or ()}
        self._pods |= {name.cgroup: name.pod for name in saved or () if name.pod}

    def _save(self) -> None:
        names = [self.source(cgroup) for cgroup in sorted(self._names)]
        state_files.write(self._state, names, failure=Event.SOURCE_NAMES_NOT_SAVED)


def wall_clock(monotonic_ns: int) -> datetime.datetime:
    """The UTC time of a CLOCK_MONOTONIC instant of this boot."""
    age_seconds = (time.monotonic_ns() - monotonic_ns) / 1e9
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_seconds)


def protocol_word(number: int) -> str:
    """ "tcp" for 6; the number itself for what is rare."""
    return _PROTOCOLS.get(number, str(number))
