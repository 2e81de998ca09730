"""Checks of the kernel's features, and of the programs for it.

Each tries the feature itself; none reads the kernel's version.
"""

import importlib.util
import os
import pathlib
from collections.abc import Iterator

from agent.admin import finding_kinds as kinds
from agent.admin.finding import as_sentence, found
from agent.linux.cgroups import cgroup2_mount
from agent.operate.doctor.results import Passed, Result
from bpf import (
    artefacts,
    errors,
    features,
    hooks,
    kubelet_unit,
    loader,
    maps,
    pins,
    program_specs,
    raw_socket_policy,
)
from bpf.attachment import Attachment
from probes.netns import netns_cookie


def check(bpffs: pathlib.Path) -> Iterator[Result]:
    yield _programs()
    yield _attachment()
    yield _process_names()
    yield from _hooks()
    yield _kubelet()
    yield _packet_sockets()
    yield _pins(bpffs)


def _programs() -> Result:
    programs = loader.PROGRAM_SET
    try:
        artefact = artefacts.find(programs, features.offered(programs.features))
    except artefacts.ArtefactError as error:
        return _compiler(str(error))
    using = f" ({', '.join(artefact.macros)})" if artefact.macros else ""
    return Passed("programs", f"Prebuilt programs fit this kernel{using}; no compiler is needed.")


def _compiler(missing: str) -> Result:
    """missing: why there is nothing prebuilt."""
    spec = importlib.util.find_spec("bcc")
    if spec is None or spec.origin is None:
        return found(
            kinds.PROGRAMS_MISSING,
            f"No prebuilt programs ({missing}), and bcc is not installed for this Python",
        )
    if not (pathlib.Path(spec.origin).parent / "libbcc.py").exists():
        return found(
            kinds.PROGRAMS_MISSING,
            f"{spec.origin} is not the BPF compiler collection but another package of that name",
            remedy="Remove it and install the distribution's python3-bpfcc.",
        )
    return Passed("programs", f"bcc compiles the programs at start: {missing}.")


def _attachment() -> Result:
    if Attachment.best() is Attachment.TCX:
        return Passed("attachment", "Gates are attached by tcx links.")
    return found(
        kinds.TCX_MISSING,
        "Kernel has no tcx (Linux 6.6): gates are clsact filters, which run after tcx programs "
        "and can be removed by any process with CAP_NET_ADMIN",
    )


def _process_names() -> Result:
    if features.reports_task_name():
        return Passed("names", "Process names are available for drops.")
    return found(
        kinds.PROCESS_NAMES_MISSING,
        "Kernel reports no process names to gates (Linux 6.16): 'podgate drops' shows cgroups, "
        "and processes only for hooks",
    )


def _hooks() -> Iterator[Result]:
    if netns_cookie() is None:
        yield found(
            kinds.COOKIES_MISSING,
            "Kernel has no netns cookies (Linux 5.14): gates drop, but without EPERM for the "
            "process, and the node's tunnels can be used to bypass gates",
        )
        return
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        problems = [
            (hook.name, problem)
            for hook in program_specs.HOOKS
            if (problem := hooks.describe_exclusive(root_fd, hook))
        ]
    finally:
        os.close(root_fd)
    for name, problem in problems:
        text, _, remedy = problem.partition("; ")
        yield found(kinds.HOOK_TAKEN, f"Hook {name}: {text}", remedy=as_sentence(remedy))
    if not problems:
        yield Passed("hooks", f"cgroup hooks can be attached at {root}.")


def _kubelet() -> Result:
    try:
        kubelet_unit.try_to_follow()
    except errors.BpfError as error:
        return found(
            kinds.KUBELET_UNFOLLOWABLE,
            f"Kernel cannot follow the kubelet's restarts ({error.strerror or error}): while the "
            "agent is missing for more than 15 s, host processes outside pods reach declared "
            "ports.",
        )
    return Passed("kubelet", "Kernel can follow the kubelet's restarts without the agent.")


def _packet_sockets() -> Result:
    try:
        raw_socket_policy.try_to_reject()
    except errors.BpfError as error:
        return found(
            kinds.PACKET_SOCKETS_UNREJECTABLE,
            f"Kernel cannot reject packet sockets ({error.strerror or error}): "
            "--raw-sockets=deny-pods rejects raw sockets of containers and only counts their "
            "packet sockets.",
        )
    return Passed("packet-sockets", "Kernel can reject packet sockets of containers.")


def _pins(bpffs: pathlib.Path) -> Result:
    installation = pins.Pins(bpffs)
    if not pins.is_bpffs(bpffs):
        return found(
            kinds.BPFFS_UNUSABLE,
            f"{bpffs} is not a BPF file system",
            remedy=f"Mount one with 'mount -t bpf bpf {bpffs}' or name another with --bpffs.",
        )
    if not os.access(bpffs, os.W_OK):
        text = f"{bpffs} is mounted read-only"
        return found(kinds.BPFFS_UNUSABLE, text, remedy="Mount it read-write.")
    try:
        maps.check_pinned(installation)
    except (errors.PinError, errors.BpfError) as error:
        return found(
            kinds.BPFFS_UNUSABLE,
            str(error),
            remedy="Run 'podgate cleanup' of the version that installed it, while no agent runs.",
        )
    if others := [schema.name for schema in installation.other_schemas()]:
        return found(
            kinds.OTHER_PINS,
            f"Pins of another version ({', '.join(others)}) exist below {installation.root}",
        )
    return Passed("bpffs", f"{bpffs} is writable.")
