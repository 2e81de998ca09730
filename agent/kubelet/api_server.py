"""Which API server the kubelet uses, by its own configuration: what nothing may keep it from."""

import dataclasses
import ipaddress
import pathlib
import urllib.parse

from agent.errors import PodgateError
from bpf.abi import IPAddress

_FLAG = "--kubeconfig"
# A kubeconfig has some kilobytes; certificates may be in it.
_MAX_BYTES = 1 << 20


class KubeletConfigError(PodgateError):
    """The kubelet's API server is unknown; one sentence without its full stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class KubeletApiServer:
    """One server. address: None where it has a name, whose addresses only its resolver knows."""

    address: IPAddress | None
    port: int

    def covers(self, address: IPAddress, port: int) -> bool:
        """Whether a connection to there may be one to this server."""
        return port == self.port and self.address in (None, address)


def read(pid: int, *, procfs: pathlib.Path = pathlib.Path("/proc")) -> list[KubeletApiServer]:
    """The servers in the kubeconfig that the process was started with, of all of its contexts.

    Blocks. Raises `KubeletConfigError`.
    """
    import yaml  # takes 30 ms, which the first gates would wait for

    directory = procfs / str(pid)
    try:
        arguments = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
        path = _argument(arguments)
        with (directory / "root" / path.lstrip("/")).open("rb") as file:
            document = yaml.safe_load(file.read(_MAX_BYTES))
        clusters = [one["cluster"]["server"] for one in document["clusters"]]
        servers = [_server(url) for url in clusters]
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise KubeletConfigError(f"the kubelet's kubeconfig cannot be read ({error})") from error
    if not servers:
        raise KubeletConfigError("the kubelet's kubeconfig has no cluster")
    return servers


def _argument(arguments: list[str]) -> str:
    for index, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        if name == _FLAG:
            return value if separator else "".join(arguments[index + 1 : index + 2])
    raise KubeletConfigError(f"the kubelet was started without {_FLAG}")


def _server(url: str) -> KubeletApiServer:
    parts = urllib.parse.urlsplit(url if "//" in url else f"//{url}")
    if not parts.hostname:
        raise ValueError(f"{url!r} has no host")
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        return KubeletApiServer(ipaddress.ip_address(parts.hostname), port)
    except ValueError:
        return KubeletApiServer(None, port)
