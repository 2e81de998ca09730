"""Checks of the kernel's features, and of the programs for it.

Each tries the feature itself; none reads the kernel's version.
"""

import importlib.util
import os
import pathlib
from collections.abc import Iterator

from agent.linux.cgroups import cgroup2_mount
from agent.operate.doctor.finding import Finding, ok, problem, warning
from bpf import (
    abi,
    artefacts,
    errors,
    features,
    hooks,
    kubelet_unit,
    loader,
    maps,
    pins,
    raw_socket_policy,
)
from bpf.attachment import Attachment
from probes.netns import netns_cookie

_NEWER_KERNEL = "Nothing has to be done; a newer kernel has it."


def check(bpffs: pathlib.Path) -> Iterator[Finding]:
    yield _programs()
    yield _attachment()
    yield _process_names()
    yield from _hooks()
    yield _kubelet()
    yield _packet_sockets()
    yield _pins(bpffs)


def _programs() -> Finding:
    programs = loader.PROGRAM_SET
    try:
        artefact = artefacts.find(programs, features.offered(programs.features))
    except artefacts.ArtefactError as error:
        return _compiler(str(error))
    using = f" ({', '.join(artefact.macros)})" if artefact.macros else ""
    return ok("programs", f"Prebuilt programs fit this kernel{using}; no compiler is needed.")


def _compiler(missing: str) -> Finding:
    """missing: why there is nothing prebuilt."""
    spec = importlib.util.find_spec("bcc")
    if spec is None or spec.origin is None:
        return problem(
            "programs",
            f"No prebuilt programs ({missing}), and bcc is not installed for this Python.",
            "Use podgate's image, or install the distribution's python3-bpfcc and use a virtual "
            "environment made with --system-site-packages.",
        )
    if not (pathlib.Path(spec.origin).parent / "libbcc.py").exists():
        return problem(
            "programs",
            f"{spec.origin} is not the BPF compiler collection but another package of that name.",
            "Remove it and install the distribution's python3-bpfcc.",
        )
    return ok("programs", f"bcc compiles the programs at start: {missing}.")


def _attachment() -> Finding:
    if Attachment.best() is Attachment.TCX:
        return ok("attachment", "Gates are attached by tcx links.")
    return warning(
        "attachment",
        "Kernel has no tcx (Linux 6.6): gates are clsact filters, which run after tcx programs "
        "and can be removed by any process with CAP_NET_ADMIN.",
        _NEWER_KERNEL,
    )


def _process_names() -> Finding:
    if features.reports_task_name():
        return ok("names", "Process names are available for drops.")
    return warning(
        "names",
        "Kernel reports no process names to gates (Linux 6.16): 'podgate drops' shows cgroups, "
        "and processes only for hooks.",
        _NEWER_KERNEL,
    )


def _hooks() -> Iterator[Finding]:
    if netns_cookie() is None:
        yield warning(
            "hooks",
            "Kernel has no netns cookies (Linux 5.14): gates drop, but without EPERM for the "
            "process, and the node's tunnels can be used to bypass gates.",
            "Use a newer kernel.",
        )
        return
    root = cgroup2_mount()
    assert root is not None  # `preflight.check`
    root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        problems = [
            (hook.name, found)
            for hook in abi.HOOKS
            if (found := hooks.describe_exclusive(root_fd, hook))
        ]
    finally:
        os.close(root_fd)
    for name, found in problems:
        text, _, remedy = found.partition("; ")
        yield warning(name, f"{text}.", f"{remedy[:1].upper()}{remedy[1:]}.")
    if not problems:
        yield ok("hooks", f"cgroup hooks can be attached at {root}.")


def _kubelet() -> Finding:
    try:
        kubelet_unit.try_to_follow()
    except errors.BpfError as error:
        return warning(
            "kubelet",
            f"Kernel cannot follow the kubelet's restarts ({error.strerror or error}): while the "
            "agent is missing for more than 15 s, host processes outside pods reach declared "
            "ports.",
            "Use a kernel with BTF and BPF trampolines (CONFIG_DEBUG_INFO_BTF).",
        )
    return ok("kubelet", "Kernel can follow the kubelet's restarts without the agent.")


def _packet_sockets() -> Finding:
    try:
        raw_socket_policy.try_to_reject()
    except errors.BpfError as error:
        return warning(
            "packet-sockets",
            f"Kernel cannot reject packet sockets ({error.strerror or error}): "
            "--raw-sockets=deny-pods rejects raw sockets of containers and only counts their "
            "packet sockets.",
            "Give no container CAP_NET_RAW on the host network; 'podgate drops' lists those that "
            "use it.",
        )
    return ok("packet-sockets", "Kernel can reject packet sockets of containers.")


def _pins(bpffs: pathlib.Path) -> Finding:
    installation = pins.Pins(bpffs)
    if not pins.is_bpffs(bpffs):
        return problem(
            "bpffs",
            f"{bpffs} is not a BPF file system.",
            f"Mount one with 'mount -t bpf bpf {bpffs}' or name another with --bpffs.",
        )
    if not os.access(bpffs, os.W_OK):
        return problem("bpffs", f"{bpffs} is mounted read-only.", "Mount it read-write.")
    try:
        maps.check_pinned(installation)
    except (errors.PinError, errors.BpfError) as error:
        return problem(
            "bpffs",
            f"{error}.",
            "Run 'podgate cleanup' of the version that installed it, while no agent runs.",
        )
    if others := [schema.name for schema in installation.other_schemas()]:
        return warning(
            "bpffs",
            f"Pins of another version ({', '.join(others)}) exist below {installation.root}.",
            "Start the agent: it removes them after the first sync.",
        )
    return ok("bpffs", f"{bpffs} is writable.")
