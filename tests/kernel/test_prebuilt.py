"""Programs that were compiled elsewhere, as an image has them: the same, or none."""

import asyncio
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from agent.lab import lab as labs
from bpf import (
    artefacts,
    compile_cache,
    compiling,
    errors,
    features,
    host_egress,
    listener_lookup,
    listeners,
    loader,
    memory_watch,
    packet_hooks,
    pinning,
    pins,
    sources,
)
from bpf.compiler import PROGRAM_SETS
from bpf.features import Feature
from bpf.gates import Attachment, Gates
from bpf.pinning import Origin
from bpf.program_sets import ProgramSet
from bpf.services import services
from tests.kernel import offers, traffic
from tests.kernel.test_attach import enforcing

pytestmark = pytest.mark.kernel

_ROOT = pathlib.Path(__file__).parents[2]
_TRACING = 26  # BPF_PROG_TYPE_TRACING

# bcc loads every program of a set itself, and prints the tags by which the kernel identifies them:
# hashes over the instructions without the descriptors of maps.
_LOAD_BY_BCC = """
import json, os, sys
from bpf import compiling, features, sources
from bpf.compiler import PROGRAM_SETS

bcc = compiling.import_bcc()
tags = {}
for programs in PROGRAM_SETS:
    used = features.offered(programs.features)
    flags = [*compiling.FLAGS, *features.compiler_flags(programs.features, used)]
    module = bcc.BPF(text=sources.expand(programs.source), cflags=flags)
    for program in programs.programs:
        if program.type == 26:
            continue
        function = program.function.encode()
        module.funcs.pop(function, None)
        attach_type = program.attach_type if program.type in (8, 18, 25) else -1
        fd = module.load_func(function, program.type, attach_type=attach_type).fd
        with open(f"/proc/self/fdinfo/{fd}") as info:
            tags[program.name] = next(l.split()[1] for l in info if l.startswith("prog_tag"))
print(json.dumps(tags))
"""


def load(installation: pins.Pins) -> loader.Loaded:
    return asyncio.run(loader.load(installation))


def tag(program_fd: int) -> str:
    lines = pathlib.Path(f"/proc/self/fdinfo/{program_fd}").read_text(encoding="ascii").splitlines()
    return next(line.split()[1] for line in lines if line.startswith("prog_tag"))


def directories(installation: pins.Pins) -> dict[str, pathlib.Path]:
    """Where each program set is pinned, by its source."""
    return {
        "programs.c": installation.programs / sources.fingerprint(),
        "listeners.c": next(iter(installation.schema.glob("listeners-*"))),
        "listener_lookup.c": next(iter(installation.schema.glob("listener-lookup-*"))),
        "host_egress.c": next(iter(installation.schema.glob("host-egress-*"))),
        "services.c": next(iter((installation.root / "services").iterdir())),
        "memory_watch.c": installation.schema / "memory-watch",
        "packet_hooks.c": installation.schema / "packet-hooks",
    }


def test_programs_are_those_that_bcc_loads(fresh_pins: pins.Pins) -> None:
    offers.need_netns_cookie()  # listeners.c reads it
    loaded = load(fresh_pins)
    loaded.close()
    assert loaded.outcome == pinning.Outcome(Origin.PREBUILT)
    asyncio.run(listeners.load(fresh_pins))
    asyncio.run(listener_lookup.load(fresh_pins))
    asyncio.run(host_egress.load(fresh_pins))
    asyncio.run(services.load(fresh_pins))
    # The agent pins these nowhere.
    for programs in (memory_watch.PROGRAM_SET, packet_hooks.PROGRAM_SET):
        directory = directories(fresh_pins)[programs.source]
        asyncio.run(pinning.ensure_pinned(programs, directory))
    ours = {}
    for programs in PROGRAM_SETS:
        for program in programs.programs:
            if program.type == _TRACING:  # bcc finds what they trace by other names
                continue
            with pins.opened(directories(fresh_pins)[programs.source] / program.name) as fd:
                ours[program.name] = tag(fd)
    output = subprocess.run(
        [sys.executable, "-c", _LOAD_BY_BCC], check=True, capture_output=True
    ).stdout
    assert ours == json.loads(output)


@pytest.mark.parametrize("attachment", list(Attachment))
def test_gate_of_prebuilt_programs_drops(
    lab: labs.Lab, fresh_pins: pins.Pins, attachment: Attachment
) -> None:
    if attachment is Attachment.TCX:
        offers.need_tcx()
    loaded = load(fresh_pins)
    assert loaded.outcome.origin is Origin.PREBUILT
    pod = lab.add_pod("prebuilt", 9)
    gates = Gates(loaded, fresh_pins, attachment)
    try:
        with pod.listen(80):
            assert traffic.node_reaches(pod, 4)
            gates.install(pod.ifindex, enforcing(pod))
            assert traffic.node_is_dropped(pod, 4)
            assert traffic.node_is_dropped(pod, 6)
    finally:
        gates.remove(pod.ifindex)
        gates.close()
        loaded.close()
        lab.remove_pod("prebuilt")


def all_feature_sets() -> list[Any]:
    return [
        pytest.param(programs, used, id="-".join([programs.source, *(f.macro for f in used)]))
        for programs in PROGRAM_SETS
        for used in programs.feature_sets()
    ]


@pytest.mark.parametrize(("programs", "used"), all_feature_sets())
def test_programs_for_other_kernels_load(
    fresh_pins: pins.Pins,
    prebuilt_programs: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: ProgramSet,
    used: tuple[Feature, ...],
) -> None:
    """A kernel with later features accepts what was compiled for an earlier one."""
    offers.need_features(used)
    if programs.source == "listeners.c":
        offers.need_netns_cookie()
    monkeypatch.setattr(features, "offered", lambda _: list(used))
    if not artefacts.path(prebuilt_programs, programs, used).exists():
        artefact = asyncio.run(compiling.compile_in_process(programs, used))
        artefacts.path(tmp_path, programs, used).write_bytes(artefact.encode())
        monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    fresh_pins.prepare()
    directory = fresh_pins.programs / "made"
    outcome = asyncio.run(pinning.ensure_pinned(programs, directory))
    assert outcome.origin is Origin.PREBUILT
    pinned = {path.name for path in directory.iterdir()}
    assert pinned >= {program.name for program in programs.programs if not program.is_optional}


_COMPILE_AS_IN_A_BUILD = """
mount --bind /dev/null /proc/kallsyms
gcc -shared -fPIC -o "$0" deploy/no_maps.c
LD_PRELOAD="$0" exec "$@"
"""


@pytest.mark.parametrize("programs", PROGRAM_SETS, ids=lambda programs: programs.source)
def test_programs_are_the_same_where_an_image_s_build_has_neither_kernel_symbols_nor_maps(
    programs: ProgramSet,
    prebuilt_programs: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without symbols bcc replaces its names for the helpers that read the kernel's memory."""
    monkeypatch.delenv(compile_cache.DIRECTORY_VARIABLE, raising=False)
    used = features.offered(programs.features)
    macros = [feature.macro for feature in used]
    shell = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        _COMPILE_AS_IN_A_BUILD,
        str(tmp_path / "no_maps.so"),
    ]
    output = subprocess.run(
        [*shell, sys.executable, "-m", "bpf.compiler", programs.source, *macros],
        cwd=_ROOT,
        check=True,
        capture_output=True,
    ).stdout
    found = artefacts.decode(output, programs)
    file = artefacts.path(prebuilt_programs, programs, used)
    usual = artefacts.decode(file.read_bytes(), programs)
    assert found.macros == usual.macros
    assert [name for name, code in found.functions.items() if code != usual.functions[name]] == []


@pytest.fixture
def file(
    prebuilt_programs: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """The artefact that would be used for the gates, the test's own."""
    offered = features.offered(loader.PROGRAM_SET.features)
    found = artefacts.path(prebuilt_programs, loader.PROGRAM_SET, offered)
    copy = tmp_path / found.name
    copy.write_bytes(found.read_bytes())
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    return copy


def test_damaged_file_is_not_used(fresh_pins: pins.Pins, file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:10_000])
    loaded = load(fresh_pins)
    loaded.close()
    reason = f"{file} cannot be used: it is damaged"
    assert loaded.outcome == pinning.Outcome(Origin.COMPILED, reason)


@pytest.fixture
def without_bcc(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started processes cannot import bcc, as in the image, nor find what it has compiled."""
    directory = tmp_path / "packages"
    directory.mkdir()
    (directory / "bcc.py").write_text("raise ImportError", encoding="ascii")
    monkeypatch.delenv(compile_cache.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_without_file_and_compiler_both_are_named(
    fresh_pins: pins.Pins, file: pathlib.Path, without_bcc: None
) -> None:
    file.unlink()
    with pytest.raises(errors.CompileError) as caught:
        load(fresh_pins)
    assert str(caught.value).startswith("bcc is not installed for this Python; ")
    assert str(caught.value).endswith(f"; there are no compiled programs in {file}")
    assert list(fresh_pins.programs.iterdir()) == []


def test_rejected_program_is_named_and_nothing_is_pinned(
    fresh_pins: pins.Pins, file: pathlib.Path, without_bcc: None
) -> None:
    fields = json.loads(file.read_bytes())
    # An exit without a return value.
    fields["functions"]["gate_ingress"] = {"instructions": "lQAAAAAAAAA=", "maps": {}}
    file.write_text(json.dumps(fields), encoding="ascii")
    with pytest.raises(errors.CompileError) as caught:
        load(fresh_pins)
    assert str(caught.value) == (
        "loading the program gate_ingress: R0 !read_ok; "
        "this needs Linux 5.10 with BPF and its JIT, and CAP_BPF"
    )
    assert [path for path in fresh_pins.programs.iterdir() if "unfinished" not in path.name] == []


def test_rejected_hook_is_left_out(fresh_pins: pins.Pins, file: pathlib.Path) -> None:
    fields = json.loads(file.read_bytes())
    fields["functions"]["hook_connect4"] = {"instructions": "lQAAAAAAAAA=", "maps": {}}
    file.write_text(json.dumps(fields), encoding="ascii")
    loaded = load(fresh_pins)
    assert "hook_connect4" not in loaded.programs
    assert "hook_connect6" in loaded.programs
    loaded.close()


def test_nothing_is_left_open(fresh_pins: pins.Pins) -> None:
    before = open_descriptors()
    (load(fresh_pins)).close()
    assert open_descriptors() == before


def write_invalid(programs: ProgramSet, prebuilt: pathlib.Path, directory: pathlib.Path) -> None:
    """The artefact of a set with one program, which the kernel rejects."""
    file = artefacts.path(prebuilt, programs, ())
    fields = json.loads(file.read_bytes())
    (program,) = programs.programs
    # An exit without a return value.
    fields["functions"][program.function] = {"instructions": "lQAAAAAAAAA=", "maps": {}}
    (directory / file.name).write_text(json.dumps(fields), encoding="ascii")


def open_descriptors() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))
