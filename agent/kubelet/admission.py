"""Admission of the kubelet by the gates: its cgroup, and the unit that the kernel follows."""

import pathlib
import stat
from collections.abc import Callable, Iterator

import structlog
from prometheus_client import core

from agent.kubelet.search import KubeletCgroup
from agent.linux.cgroups import cgroup2_mount
from agent.logs import Event
from agent.metrics import MetricFamily, single
from agent.settings import ByCgroup, KubeletSetting
from bpf.kubelet_unit import KubeletUnit
from bpf.node_config import NodeConfig

log = structlog.get_logger(__name__)

IDENTIFIED = MetricFamily(
    "podgate_kubelet_identified", "gauge", "1 if the kubelet's cgroup is known."
)
ADMITTED = MetricFamily(
    "podgate_kubelet_admitted",
    "gauge",
    "1 if gates admit one cgroup as the kubelet's; with 0 they admit all host processes outside "
    "pods to declared ports, until the kubelet is identified.",
)
FOLLOWED = MetricFamily(
    "podgate_kubelet_followed",
    "gauge",
    "1 if the kernel follows the kubelet's restarts without the agent; with 0, host processes "
    "outside pods reach declared ports while the agent is missing for more than 15 s.",
)


class KubeletAdmission:
    """Writes what `KubeletIdentity` finds to the gates' configuration."""

    def __init__(
        self,
        setting: KubeletSetting,
        config: NodeConfig,
        unit: KubeletUnit,
        *,
        has_connect_hooks: Callable[[], bool],
    ) -> None:
        """has_connect_hooks: whether they set the priority of the unit's sockets."""
        self._config = config
        self._unit = unit
        self._has_connect_hooks = has_connect_hooks
        self._current: KubeletCgroup | None = None
        self._delegated: pathlib.Path | None = None
        self._logged = ""
        self._is_other_unit = False
        if isinstance(setting, ByCgroup):
            self._is_other_unit = unit.path not in (None, setting.path)
            # Before the kubelet starts for the first time.
            self._follow(setting.path)

    def update(self, found: KubeletCgroup | None, *, is_rejected: bool, is_overdue: bool) -> None:
        """Admit this cgroup. is_rejected: there is none because it must not be admitted;
        is_overdue: it has been missing for longer than a restart takes.

        A kubelet that is only missing is about to start in its unit's cgroup, perhaps after the
        agent has been killed. The kernel follows it there for any time, so it stays the only one
        that is admitted. Otherwise, and if the configured unit is not the one that was followed,
        the kubelet is unknown, which admits host processes outside pods.
        """
        self._current = found
        if found is not None:
            if self._unit.path != found.path:
                # If the agent is killed in between, no other unit than this kubelet's is followed.
                self._unit.forget()
            self._config.set_kubelet(found.id)
            self._follow(found.path)
        elif is_rejected:
            self._config.set_kubelet(None)
            self._unit.forget()
        elif self._is_other_unit or (is_overdue and self._unit.path is None):
            self._config.set_kubelet(None)
        self._is_other_unit = False

    @property
    def has_cgroup(self) -> bool:
        """Whether gates admit one cgroup; otherwise all host processes outside pods."""
        # Of a kubelet that is found, `update` has written it. Of one that is missing, the kernel
        # may have recorded the next one.
        return self._current is not None or bool(self._config.facts().kubelet_cgroups)

    @property
    def problem(self) -> str:
        """Why the kernel does not follow the kubelet's restarts, in one sentence; else empty."""
        if self._delegated is not None:
            return (
                f"{self._delegated} does not belong to root alone, so other users can make cgroups "
                "at the kubelet's path; run it as a unit of the system."
            )
        if not self._unit.problem and not self._has_connect_hooks():
            return (
                "the hooks at connect do not work, so pods that are created while the agent "
                "is missing open after a minute."
            )
        return self._unit.problem

    @property
    def priority(self) -> int | None:
        """As `KubeletUnit.priority`; None also if no hook sets it."""
        return self._unit.priority if self._has_connect_hooks() else None

    def collect(self) -> Iterator[core.Metric]:
        """For Prometheus; to be registered once."""
        yield single(IDENTIFIED, self._current is not None)
        yield single(ADMITTED, self.has_cgroup)
        yield single(FOLLOWED, self._unit.path is not None)

    def _follow(self, path: str) -> None:
        self._delegated = _delegated(path)
        if self._delegated is None:
            self._unit.follow(path)
        else:
            self._unit.forget()
        if self.problem and self.problem != self._logged:
            log.warning(Event.KUBELET_NOT_FOLLOWED, reason=self.problem)
        self._logged = self.problem


def _delegated(path: str) -> pathlib.Path | None:
    """The first cgroup above this one in which users other than root may make cgroups, or None."""
    cgroup2 = cgroup2_mount()
    for parent in reversed(pathlib.PurePath(path).parents):
        directory = (cgroup2 or pathlib.Path("/")) / parent.relative_to("/")
        try:
            status = directory.stat()
        except FileNotFoundError:
            return None
        if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return directory
    return None
