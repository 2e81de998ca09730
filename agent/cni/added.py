"""Pods that podgate-cni has just gated: their sandboxes, before the runtime lists them.

The plugin sends one datagram at the end of each ADD, if an agent runs. A lost one costs only time:
the runtime lists the sandbox some milliseconds later.
"""

import asyncio
import contextlib
import ipaddress
import pathlib
import socket
from collections.abc import AsyncIterator

import msgspec
import structlog

from agent.cri.models import NetworkedSandbox, Sandbox
from agent.logs import Event
from bpf.abi import IPAddress

log = structlog.get_logger(__name__)

# Datagrams that wait for a busy loop; the kernel keeps some more.
_MAX_WAITING = 256
_RETRY_SECONDS = 10.0


class _Address(msgspec.Struct):
    address: str


class _Result(msgspec.Struct):
    ips: list[_Address] = []


class _Added(msgspec.Struct):
    """What the plugin sends (`announce` of deploy/cni/podgate-cni.c); `args` is CNI_ARGS, `result`
    that of the plugins before it."""

    sandbox: str
    netns: str
    args: str
    result: _Result


class AddedError(ValueError):
    """The datagram is not podgate-cni's, or not about a Kubernetes pod."""


def read(content: bytes) -> NetworkedSandbox:
    """The sandbox of a datagram. Raises `AddedError`."""
    try:
        added = msgspec.json.decode(content, type=_Added)
        args = dict(part.split("=", 1) for part in added.args.split(";") if "=" in part)
        ips = tuple(_address(one.address) for one in added.result.ips)
        sandbox = Sandbox(
            id=added.sandbox,
            pod_uid=args["K8S_POD_UID"],
            pod_name=args["K8S_POD_NAME"],
            pod_namespace=args["K8S_POD_NAMESPACE"],
            attempt=0,
            created=None,
            is_ready=False,
            ips=ips,
        )
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise AddedError(str(error)) from error
    return NetworkedSandbox(sandbox, added.netns)


async def received(run_directory: pathlib.Path) -> AsyncIterator[NetworkedSandbox]:
    """Each sandbox that the plugin reports, until cancelled."""
    waiting: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
    while True:
        try:
            listening = _listen(run_directory)
        except OSError as error:
            log.warning(Event.CNI_SOCKET_UNAVAILABLE, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Receiver(waiting), sock=listening
        )
        try:
            while True:
                with contextlib.suppress(AddedError):
                    yield read(await waiting.get())
        finally:
            transport.close()


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, waiting: asyncio.Queue[bytes]) -> None:
        self._waiting = waiting

    def datagram_received(self, data: bytes, addr: object) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._waiting.put_nowait(data)


def _listen(run_directory: pathlib.Path) -> socket.socket:
    """In a directory that only root enters: the runtime calls the plugin as root."""
    path = run_directory / "cni" / "added.sock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a running agent holds the run directory's lock
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        listening.bind(str(path))
    except OSError:
        listening.close()
        raise
    return listening


def _address(text: str) -> IPAddress:
    return ipaddress.ip_interface(text).ip
