"""Another schema, newer or older, takes gates over without a gap and leaves nothing behind."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import abi, cleanup, loader, map_specs, pins, program_specs, syscalls
from bpf.gate_table import GateTable
from bpf.gates import Attachment, Gates
from bpf.host_devices import HostDevicePrograms
from bpf.injectable import InjectableMap
from bpf.verdicts import Reason, Verdict
from tests.kernel import foreign, links, offers, traffic, versions
from tests.kernel.reply_tables import start_reply_table
from tests.kernel.test_attach import attacked, enforcing, filters

pytestmark = [pytest.mark.kernel, pytest.mark.file_node]

BOTH = pytest.mark.parametrize("kind", list(Attachment), indirect=True)
TCX = pytest.mark.parametrize("kind", [Attachment.TCX], indirect=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One of two versions of podgate on the same node."""

    installation: pins.Pins
    loaded: loader.Loaded
    attachment: Attachment

    @contextlib.contextmanager
    def started(self) -> Iterator[Gates]:
        """Its gates, as a process that starts and ends has them."""
        gates = Gates(self.loaded, self.installation, self.attachment)
        try:
            yield gates
        finally:
            gates.close()

    @contextlib.contextmanager
    def host_devices(self) -> Iterator[HostDevicePrograms]:
        made = HostDevicePrograms(self.loaded, self.installation, self.attachment)
        with contextlib.closing(made):
            yield made

    @contextlib.contextmanager
    def table(self) -> Iterator[GateTable]:
        with contextlib.closing(GateTable(self.loaded, self.installation.maps)) as table:
            yield table

    @property
    def links(self) -> list[str]:
        return sorted(os.listdir(self.installation.links))


@pytest.fixture(scope="module")
def loads(
    isolated: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, loader.Loaded]]:
    """The programs and maps of three schemas: ours, an older and a newer one."""
    bpffs = labs.LAB_DIRECTORY / "bpf" / "schemas"
    bpffs.mkdir()
    made = {}
    for schema in (abi.SCHEMA - 1, abi.SCHEMA, abi.SCHEMA + 1):
        directory = tmp_path_factory.mktemp(f"v{schema}")
        installation = pins.Pins(bpffs, schema)
        made[schema] = versions.load_as(directory, installation)
        asyncio.run(loader.load_moving_copies(installation, made[schema]))
    pins.Pins(bpffs).remove_everything()
    yield made
    for loaded in made.values():
        loaded.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Attachment:
    found: Attachment = request.param
    if found is Attachment.TCX:
        offers.need_tcx()
    return found


MakeVersion = Callable[[int], Version]


@pytest.fixture
def make_version(
    lab: labs.Lab, fresh_pins: pins.Pins, kind: Attachment, loads: dict[int, loader.Loaded]
) -> Iterator[MakeVersion]:
    made = []

    def make(schema: int) -> Version:
        installation = pins.Pins(fresh_pins.bpffs, schema)
        installation.prepare()
        made.append(Version(installation, loads[schema], kind))
        return made[-1]

    yield make
    for version in made:
        version.installation.prepare()
        with version.started() as gates:
            for ifindex in gates.installed():
                gates.remove(ifindex)
            gates.installed()  # forgets entries of what is not attached


@pytest.fixture
def before(make_version: MakeVersion) -> Version:
    return make_version(abi.SCHEMA)


@pytest.fixture(params=["upgrade", "roll-back"])
def after(request: pytest.FixtureRequest, make_version: MakeVersion) -> Version:
    return make_version(abi.SCHEMA + (1 if request.param == "upgrade" else -1))


@pytest.fixture
def pod(lab: labs.Lab) -> Iterator[labs.LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(80):
        yield made


def schemas(version: Version) -> list[str]:
    return sorted(os.listdir(version.installation.root))


@BOTH
def test_gate_of_another_schema_is_taken_over_without_a_gap(
    before: Version, after: Version, pod: labs.LabPod
) -> None:
    with before.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
        start_reply_table(gates, pod.ifindex)
    with attacked(pod), after.started() as gates:
        assert gates.installed() == {pod.ifindex: None}
        gates.install(pod.ifindex, enforcing(pod))
        start_reply_table(gates, pod.ifindex)
        assert gates.installed() == {pod.ifindex: enforcing(pod)}
        gates.remove_stale()
    assert traffic.node_is_dropped(pod, 4)
    assert schemas(after) == [after.installation.schema.name]
    if after.attachment is Attachment.TCX:
        names = [f"{name}-{pod.ifindex}" for name in ("gate_egress", "gate_ingress")]
        assert after.links == names
        ours = syscalls.program_id(after.loaded.programs["gate_egress"])
        assert syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS) == [ours]
    else:
        assert len(filters(pod)) == 1


@BOTH
def test_gate_uses_the_old_maps_until_it_is_taken_over(
    before: Version, after: Version, pod: labs.LabPod
) -> None:
    with before.started() as old, after.started() as new:
        old.install(pod.ifindex, enforcing(pod))
        for _ in range(2):
            assert new.installed() == {pod.ifindex: None}
            new.remove_stale()
        assert traffic.node_is_dropped(pod, 4)
        assert old.counts()[pod.ifindex][Verdict.DROP, Reason.NODE] == 1
        assert new.counts() == {}
        assert len(schemas(after)) == 2


@BOTH
def test_there_and_back_again_without_a_gap(
    before: Version, after: Version, pod: labs.LabPod
) -> None:
    with attacked_after_install(before, pod):
        for version in (after, before, after, before):
            with version.started() as gates:
                gates.install(pod.ifindex, enforcing(pod))
                start_reply_table(gates, pod.ifindex)
    with before.started() as gates:
        assert gates.installed() == {pod.ifindex: enforcing(pod)}
    assert traffic.node_is_dropped(pod, 4)


@contextlib.contextmanager
def attacked_after_install(version: Version, pod: labs.LabPod) -> Iterator[None]:
    with version.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
    with attacked(pod):
        yield


@BOTH
def test_gate_of_another_schema_is_removed_completely(
    before: Version, after: Version, pod: labs.LabPod
) -> None:
    with before.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
        start_reply_table(gates, pod.ifindex)
    with after.started() as gates:
        gates.remove(pod.ifindex)
        gates.remove_stale()
        assert gates.installed() == {}
    assert traffic.node_reaches(pod, 4)
    assert filters(pod) == filters(pod, "ingress") == []
    assert schemas(after) == [after.installation.schema.name]


@BOTH
def test_relay_pair_of_another_schema_counts_until_it_is_deleted(
    before: Version, after: Version, pod: labs.LabPod
) -> None:
    """Its directory stays as long: with its links, what is attached would go. A pair may go, too,
    without anything else being attached.
    """
    with before.host_devices() as old:
        old.ensure_pairs({pod.ifindex})
    with after.host_devices() as new:
        assert new.other_interfaces() == {pod.ifindex}
        links.ip(f"link delete {pod.interface}")
        assert new.other_interfaces() == set()


@TCX
@pytest.mark.parametrize("starts_again", ["before", "after"])
def test_interrupted_take_over_opens_nothing(
    before: Version, after: Version, pod: labs.LabPod, starts_again: str
) -> None:
    """The program is swapped and the pin not moved: pin and program have different schemas."""
    with before.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
    with after.table() as table:
        table.set(pod.ifindex, enforcing(pod), 0)
    with os.fdopen(syscalls.open_pin(before.installation.link("gate_egress", pod.ifindex))) as link:
        syscalls.link_update(link.fileno(), after.loaded.programs["gate_egress"])
    with attacked(pod), (before if starts_again == "before" else after).started() as gates:
        assert gates.installed().keys() == {pod.ifindex}
        assert traffic.node_is_dropped(pod, 4)
        gates.install(pod.ifindex, enforcing(pod))
        assert gates.installed() == {pod.ifindex: enforcing(pod)}
    assert traffic.node_is_dropped(pod, 4)


@BOTH
def test_taken_over_gate_gets_a_grace_period_and_an_attached_one_does_not(
    before: Version, after: Version, pod: labs.LabPod
) -> None:
    """The reply table is the other schema's: ours is empty."""
    with before.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
        assert grace(before, pod) == 0
        gates.install(pod.ifindex, enforcing(pod), grace_seconds=5)
        assert grace(before, pod) == 0
    for version in (after, before):
        with version.started() as gates:
            gates.install(pod.ifindex, enforcing(pod), grace_seconds=500)
            given = grace(version, pod)
            assert given > time.monotonic_ns()
            assert start_reply_table(gates, pod.ifindex)
            assert not start_reply_table(gates, pod.ifindex)
            gates.install(pod.ifindex, enforcing(pod), grace_seconds=1000)
            assert grace(version, pod) == given


@TCX
def test_injectable_interfaces_are_copied_before_the_first_gate(
    before: Version, after: Version
) -> None:
    known, new = InjectableMap(before.loaded), InjectableMap(after.loaded)
    for ifindex in (3, 64, 100_000):
        known.mark(ifindex, is_node_sent=True)
    syscalls.pin(
        before.loaded.map(map_specs.INJECTABLE).fd, before.installation.map(map_specs.INJECTABLE)
    )
    new.inherit(after.installation)
    assert new.marked() == {3, 64, 100_000}
    known.mark(5, is_node_sent=True)
    new.inherit(after.installation)
    assert new.marked() == {3, 64, 100_000}
    for origin in (known, new):
        for ifindex in origin.marked():
            origin.mark(ifindex, is_node_sent=False)


def grace(version: Version, pod: labs.LabPod) -> int:
    with version.table() as table:
        found = table.grace_until_ns(pod.ifindex)
    assert found is not None
    return found


@TCX
def test_other_files_of_another_schema_are_removed(before: Version, after: Version) -> None:
    left = before.installation.schema / "listeners-0"
    left.mkdir()
    for version in (before, after):
        (version.installation.programs / "1-unfinished").mkdir()
    hook = foreign.load_program(foreign.TC_ACT_OK)
    for directory in (
        left,
        before.installation.programs / "1-unfinished",
        before.installation.links,
        after.installation.links,
    ):
        syscalls.pin(hook, str(directory / "connect4-cgroup"))
    os.close(hook)
    with after.started() as gates:
        gates.remove_stale()
    assert schemas(after) == [after.installation.schema.name]
    assert after.links == ["connect4-cgroup"]
    assert os.listdir(after.installation.programs) == []


@TCX
def test_link_with_another_name_is_found_in_other_schemas(before: Version, after: Version) -> None:
    link = foreign.load_program(foreign.TC_ACT_OK)
    syscalls.pin(link, str(before.installation.links / "hook"))
    os.close(link)
    (found,) = after.installation.find_links("hook")
    assert found == before.installation.links / "hook"
    after.installation.adopt(found, "hook")
    assert after.installation.find_links("hook") == [after.installation.links / "hook"]


@TCX
def test_deleted_interface_keeps_no_schema(lab: labs.Lab, before: Version, after: Version) -> None:
    pod = lab.add_pod("gone", 2)
    with before.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
    lab.remove_pod("gone")
    with after.started() as gates:
        assert gates.installed() == {}
        gates.remove_stale()
    assert schemas(after) == [after.installation.schema.name]


@BOTH
@pytest.mark.usefixtures("after")
def test_clean_up_removes_the_gates_of_every_schema(before: Version, pod: labs.LabPod) -> None:
    with before.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
        start_reply_table(gates, pod.ifindex)
    removed = cleanup.remove_everything(pins.Pins(before.installation.bpffs, 99))
    assert removed.filters == (2 if before.attachment is Attachment.CLSACT else 0)
    assert filters(pod) == filters(pod, "ingress") == []
    assert traffic.node_reaches(pod, 4)


@TCX
def test_interrupted_move_of_another_schema_is_completed(
    before: Version, after: Version, pod: labs.LabPod
) -> None:
    """Both of its links are in force; one is taken over, and the other is removed."""
    with before.started() as gates:
        gates.install(pod.ifindex, enforcing(pod))
    front = syscalls.link_create_tcx(
        before.loaded.programs[program_specs.moving_copy("gate_egress")],
        pod.ifindex,
        syscalls.BPF_TCX_EGRESS,
        syscalls.BPF_F_BEFORE,
    )
    path = before.installation.link("gate_egress", pod.ifindex) + pins.MOVING
    syscalls.pin(front, path)
    os.close(front)
    with attacked(pod), after.started() as gates:
        assert gates.installed() == {pod.ifindex: None}
        gates.install(pod.ifindex, enforcing(pod))
        gates.remove_stale()
    chain = syscalls.query_programs(pod.ifindex, syscalls.BPF_TCX_EGRESS)
    assert chain == [syscalls.program_id(after.loaded.programs["gate_egress"])]
    assert after.links == [f"gate_egress-{pod.ifindex}"]
    assert traffic.node_is_dropped(pod, 4)
