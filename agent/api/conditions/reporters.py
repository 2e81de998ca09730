"""Whether a process is one of those that a ConditionOwner names, by what the kernel reports of it.

Nothing that the process sends counts: its user is that of its connection (SO_PEERCRED), its unit or
pod that of its cgroup.
"""

import dataclasses
from collections.abc import Callable

from agent.api.conditions.owner import ConditionOwner, PodsField, ProcessField
from agent.drops.merging import pod_uid


@dataclasses.dataclass(frozen=True, slots=True)
class Reporter:
    """The process at the other end of a connection. user: -1 if unknown; cgroup: of version 2, None
    if the process has ended or is not visible here."""

    user: int
    cgroup: str | None


AccountOf = Callable[[str], PodsField | None]
"""The namespace and service account of a pod, by the runtime's uid."""


def is_named(reporter: Reporter, owner: ConditionOwner, account_of: AccountOf) -> bool:
    """Whether the owner's conditions are this process' to report."""
    return any(_matches(reporter, one, account_of) for one in owner.spec.reporters)


def _matches(reporter: Reporter, field: ProcessField, account_of: AccountOf) -> bool:
    cgroup = reporter.cgroup
    if field.user is not None and field.user != reporter.user:
        return False
    if field.systemd_unit is None and field.cgroup is None and field.pods is None:
        return True
    if cgroup is None:
        return False
    if field.systemd_unit is not None and _unit_of(cgroup) != field.systemd_unit:
        return False
    if field.cgroup is not None and not f"{cgroup}/".startswith(f"{field.cgroup}/"):
        return False
    if field.pods is None:
        return True
    uid = pod_uid(cgroup)
    return bool(uid) and account_of(uid) == field.pods


def _unit_of(cgroup: str) -> str:
    """The unit that the node's systemd started; empty if it is none.

    It is the first part that is no slice: below it are cgroups that the unit makes itself, with any
    names, as a user's systemd does in user@1000.service, and a runtime in a pod's.
    """
    parts = cgroup.strip("/").split("/")
    return next((part for part in parts if not part.endswith(".slice")), "")
