"""What gates admit as the kubelet when the agent finds it, misses it or rejects its cgroup."""

import os
from collections.abc import Iterator

import pytest

from agent.kubelet.admission import KubeletAdmission
from agent.kubelet.search import KubeletCgroup
from agent.settings import ByCgroup, ByProcess, KubeletSetting
from bpf import abi, loader, map_specs, pins, program_specs
from bpf.kubelet_unit import KubeletUnit
from bpf.node_config import NodeConfig
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup

pytestmark = pytest.mark.kernel

UNPRIVILEGED = 65534


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    yield NodeConfig(loaded)
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.fixture
def unit(
    loaded: loader.Loaded, installation: pins.Pins, config: NodeConfig
) -> Iterator[KubeletUnit]:
    made = KubeletUnit(loaded, installation, config)
    made.attach()
    yield made
    made.forget()
    os.unlink(installation.links / program_specs.FOLLOW_KUBELET.name)


@pytest.fixture
def system() -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def service(system: Cgroup) -> Iterator[Cgroup]:
    with cgroups.cgroup("kubelet.service", below=system) as made:
        yield made


def admission_of(
    config: NodeConfig, unit: KubeletUnit, setting: KubeletSetting | None = None
) -> KubeletAdmission:
    return KubeletAdmission(setting or ByProcess(), config, unit, has_connect_hooks=lambda: True)


def metrics(admission: KubeletAdmission) -> dict[str, float]:
    """Values by the last word of their names."""
    return {
        metric.name.rpartition("_")[2]: metric.samples[0].value for metric in admission.collect()
    }


def found(group: Cgroup) -> KubeletCgroup:
    return KubeletCgroup(group.path, group.id, is_shared=False, pid=1)


def test_found_kubelet_is_admitted_and_followed(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    admission = admission_of(config, unit)
    admission.update(found(service), is_rejected=False, is_overdue=False)
    assert config.read().kubelet_cgroup == service.id
    assert unit.path == service.path
    assert admission.problem == ""
    assert admission.priority == unit.priority is not None


def test_missing_kubelet_stays_followed(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    """The agent may be killed before it is back, in the same cgroup or another at its path."""
    admission = admission_of(config, unit)
    admission.update(found(service), is_rejected=False, is_overdue=False)
    admission.update(None, is_rejected=False, is_overdue=False)
    assert config.read().kubelet_cgroup == service.id
    assert unit.path == service.path


def test_missing_kubelet_that_is_not_followed_is_unknown_after_longer_than_a_restart(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    admission = admission_of(config, unit)
    admission.update(found(service), is_rejected=False, is_overdue=False)
    unit.forget()
    admission.update(None, is_rejected=False, is_overdue=False)
    assert config.read().kubelet_cgroup == service.id
    assert admission.has_cgroup
    admission.update(None, is_rejected=False, is_overdue=True)
    assert config.read().kubelet_cgroup == 0
    assert not admission.has_cgroup


def test_missing_kubelet_stays_followed_for_any_time(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    admission = admission_of(config, unit)
    admission.update(found(service), is_rejected=False, is_overdue=False)
    admission.update(None, is_rejected=False, is_overdue=True)
    assert config.read().kubelet_cgroup == service.id
    assert unit.path == service.path
    assert admission.has_cgroup


def test_rejected_cgroup_is_neither_admitted_nor_followed(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    admission = admission_of(config, unit)
    admission.update(found(service), is_rejected=False, is_overdue=False)
    admission.update(None, is_rejected=True, is_overdue=False)
    assert config.read().kubelet_cgroup == 0
    assert unit.path is None
    assert admission.priority is None
    assert not admission.has_cgroup


def test_first_cgroup_that_the_kernel_has_recorded_is_the_kubelet_s(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    cgroups.remove(service)
    admission = admission_of(config, unit, ByCgroup(service.path))
    admission.update(None, is_rejected=False, is_overdue=False)
    assert metrics(admission) == {"identified": 0, "admitted": 0, "followed": 1}
    service.directory.mkdir()
    assert metrics(admission) == {"identified": 0, "admitted": 1, "followed": 1}
    admission.update(found(service), is_rejected=False, is_overdue=False)
    assert metrics(admission) == {"identified": 1, "admitted": 1, "followed": 1}


@pytest.mark.parametrize("is_changed", [False, True], ids=["same", "changed"])
def test_kubelet_of_another_setting_counts_for_nothing(
    loaded: loader.Loaded,
    installation: pins.Pins,
    config: NodeConfig,
    unit: KubeletUnit,
    system: Cgroup,
    service: Cgroup,
    is_changed: bool,
) -> None:
    """An agent that starts with --kubelet of a unit that does not exist, after one that found it;
    with the same setting it may start while its unit does, too."""
    admission_of(config, unit).update(found(service), is_rejected=False, is_overdue=False)
    path = f"{system.path}/nosuch.service" if is_changed else service.path
    unit = KubeletUnit(loaded, installation, config)
    unit.attach()
    following = admission_of(config, unit, ByCgroup(path))
    for is_overdue in (False, True):
        following.update(None, is_rejected=False, is_overdue=is_overdue)
        assert following.has_cgroup is not is_changed
    following.update(found(service), is_rejected=False, is_overdue=False)
    assert following.has_cgroup


def test_configured_unit_is_followed_before_it_starts(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    cgroups.remove(service)
    admission_of(config, unit, ByCgroup(service.path))
    service.directory.mkdir()
    assert config.facts().remade_cgroup == service.id


@pytest.mark.parametrize("how", ["owner", "mode"])
def test_path_at_which_other_users_can_make_cgroups_is_not_followed(
    config: NodeConfig, unit: KubeletUnit, system: Cgroup, service: Cgroup, how: str
) -> None:
    """Such as a kubelet that was started from a user's session."""
    if how == "owner":
        os.chown(system.directory, UNPRIVILEGED, UNPRIVILEGED)
    else:
        system.directory.chmod(0o775)
    admission = admission_of(config, unit)
    admission.update(found(service), is_rejected=False, is_overdue=False)
    assert config.read().kubelet_cgroup == service.id
    assert unit.path is None
    assert admission.problem.startswith(f"{system.directory} does not belong to root alone")


def test_missing_connect_hooks_are_a_problem(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    admission = KubeletAdmission(ByProcess(), config, unit, has_connect_hooks=lambda: False)
    admission.update(found(service), is_rejected=False, is_overdue=False)
    assert unit.path == service.path
    assert admission.priority is None
    assert admission.problem.startswith("the hooks at connect do not work")
