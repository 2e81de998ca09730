"""Where a sandbox's network namespace is: the runtime's word, and what is really there.

The CRI has no field for it. containerd and CRI-O tell it in the JSON of a verbose PodSandboxStatus
(containerd, internal/cri/types/sandbox_info.go; CRI-O, server/sandbox_status.go). A wrong namespace
would have podgate gate, and probe, another pod: so the pod's addresses must be in it.
"""

import asyncio
import dataclasses
from collections.abc import Iterator

import msgspec
import pyroute2

from agent.cri.models import SandboxDetails
from agent.linux.pod_network import NetworkReader
from bpf.abi import IPAddress
from probes.netns import Netns, NetnsError


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
    """A namespace, or one sentence why there is none."""

    netns: Netns | None
    problem: str = ""


class NetnsLocator:
    """Finds sandboxes' namespaces, on the event loop; `close` it at the end."""

    def __init__(self) -> None:
        # Of its own, and one question at a time: pyroute2's sockets are made at the first one.
        self._reader = NetworkReader()
        self._turn = asyncio.Lock()

    def close(self) -> None:
        self._reader.close()

    async def locate(self, details: SandboxDetails) -> SandboxNetns:
        """The first of the places that a runtime tells which has the pod's addresses."""
        problems: list[str] = []
        for path in netns_paths(details):
            try:
                netns = Netns.open(path)
                if problem := await self._mismatch(netns, details.ips):
                    problems.append(problem)
                else:
                    return SandboxNetns(netns)
            except NetnsError as error:
                problems.append(str(error))
            except (OSError, TimeoutError, pyroute2.NetlinkError) as error:
                problems.append(f"{path} cannot be looked into ({error or 'no answer'}).")
        if not problems:
            return SandboxNetns(None, "The runtime does not say where the network namespace is.")
        return SandboxNetns(None, " ".join(problems))

    async def _mismatch(self, netns: Netns, ips: tuple[IPAddress, ...]) -> str:
        async with self._turn:
            network = await self._reader.read(netns)
        missing = [str(ip) for ip in ips if ip not in network.addresses]
        if not missing:
            return ""
        return (
            f"{', '.join(missing)} is on no interface of {netns.path}: it is not the pod's "
            "namespace, or a virtual machine has the address."
        )


def netns_paths(details: SandboxDetails) -> Iterator[str]:
    """Where the namespace may be, the likeliest place first.

    The last one is the sandbox's process: for an agent that does not see the runtime's mounts but
    shares its PID namespace. That is only tried where addresses can tell whether it is the right
    one: in another PID namespace the number is anybody's.
    """
    for text in details.info.values():
        try:
            info = msgspec.json.decode(text, type=_RuntimeInfo)
        except msgspec.MsgspecError:
            # A runtime may say there whatever it likes.
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
            if path.startswith("/var/run/"):
                # Of the node a link to /run, which an image may have otherwise.
                yield path.removeprefix("/var")
            elif path.startswith("/"):
                yield path
