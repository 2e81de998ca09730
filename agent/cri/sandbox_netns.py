"""Locates a sandbox's network namespace, as the runtime reports it, and verifies it.

The CRI has no field for it. containerd and CRI-O report it in the JSON of a verbose
PodSandboxStatus (containerd, internal/cri/types/sandbox_info.go; CRI-O, server/sandbox_status.go).
With a wrong namespace podgate would gate and probe another pod, so it must have the pod's
addresses.
"""

import dataclasses
import os
from collections.abc import Iterator

import msgspec

from agent.cri.models import SandboxDetails
from agent.linux import pod_network
from bpf.abi import IPAddress
from probes.netns import OWN_NETNS, Netns, NetnsError, NetnsUnreadableError


class _LinuxNamespace(msgspec.Struct):
    type: str = ""
    path: str = ""


class _Linux(msgspec.Struct):
    namespaces: list[_LinuxNamespace] | None = None


class _RuntimeSpec(msgspec.Struct):
    linux: _Linux | None = None


class _SandboxMetadata(msgspec.Struct, rename={"netns_path": "NetNSPath"}):
    netns_path: str = ""


class _RuntimeInfo(msgspec.Struct, rename="camel"):
    pid: int = 0
    runtime_spec: _RuntimeSpec | None = None
    sandbox_metadata: _SandboxMetadata | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SandboxNetns:
    """A sandbox's namespace, or why there is none, in one sentence. is_unknown: whether this
    process could not read it now, for want of descriptors or memory."""

    netns: Netns | None
    problem: str = ""
    is_unknown: bool = False


async def locate(details: SandboxDetails) -> SandboxNetns:
    """The first of the reported namespaces that has the pod's addresses."""
    problems: list[str] = []
    is_unknown = False
    for path in netns_paths(details):
        try:
            netns = Netns.open(path)
            if problem := await _mismatch(netns, details.ips):
                problems.append(problem)
            else:
                return SandboxNetns(netns)
        except NetnsError as error:
            is_unknown = is_unknown or isinstance(error, NetnsUnreadableError)
            problems.append(str(error))
        except OSError as error:
            is_unknown = True
            problems.append(f"{path} cannot be read ({error or 'no response'}).")
    if not problems:
        return SandboxNetns(None, "The container runtime reports no network namespace.")
    return SandboxNetns(None, " ".join(problems), is_unknown)


async def _mismatch(netns: Netns, ips: tuple[IPAddress, ...]) -> str:
    present = await pod_network.addresses_in(netns)
    missing = [str(ip) for ip in ips if ip not in present]
    if not missing:
        return ""
    return (
        f"{', '.join(missing)} is on no interface of {netns.path}: either it is not the pod's "
        "namespace, or a virtual machine has the address."
    )


def netns_paths(details: SandboxDetails) -> Iterator[str]:
    """Paths that may be the namespace, the most likely first.

    The last one is by the sandbox's process: for an agent that does not see the runtime's mounts
    but shares its PID namespace. It is used only if the sandbox has addresses to verify it by: in
    another PID namespace the pid may be any process.
    """
    for text in details.info.values():
        try:
            info = msgspec.json.decode(text, type=_RuntimeInfo)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # The content is up to the runtime.
            continue
        linux = info.runtime_spec.linux if info.runtime_spec else None
        paths = [
            space.path
            for space in (linux.namespaces if linux else None) or ()
            if space.type == "network"
        ]
        if info.sandbox_metadata:
            paths.append(info.sandbox_metadata.netns_path)
        if info.pid > 0 and details.ips:
            paths.append(f"/proc/{info.pid}/ns/net")
        for path in dict.fromkeys(paths):
            if path.startswith("/"):
                yield _without_link(path)


def is_of_host(path: str) -> bool:
    """Whether the namespace at a reported path is the host's. CRI-O mounts that for a pod of the
    host network as it mounts a pod's own. False for one that cannot be read."""
    try:
        return os.path.samefile(_without_link(path), OWN_NETNS)
    except (OSError, ValueError):
        return False


def _without_link(path: str) -> str:
    """/var/run is a link to /run on the node, but not in every image."""
    return path.removeprefix("/var") if path.startswith("/var/run/") else path
