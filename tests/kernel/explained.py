"""Sources of flows, as `podgate explain` finds them, for tests of its verdicts."""

from agent.linux.cgroups import ancestors, cgroup2_mount
from agent.linux.procfs import Procfs
from agent.operate.explain import facts
from agent.operate.explain.facts import Source
from bpf.rule_evaluation import Cgroup


def source_in(path: str) -> Source:
    """A host process in this cgroup."""
    mount = cgroup2_mount()
    assert mount is not None
    found = ancestors(mount, path)
    return Source(facts.HOST, "a test", Cgroup(found[-1], path, tuple(found)))


def own_source() -> Source:
    """The test itself."""
    path = Procfs().cgroup("self")
    assert path is not None
    return source_in(path)
