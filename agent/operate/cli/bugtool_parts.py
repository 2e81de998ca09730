"""The parts of `podgate bugtool`: agent, pins, kernel, network and logs."""

import asyncio
import os
import pathlib
import platform
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import pyroute2

from agent.admin import client as admin_client
from agent.default_deny import ruleset
from agent.linux import nft
from agent.operate.cli.bugtool import Content, Part
from agent.operate.cli.redaction import LEFT_OUT
from agent.operate.doctor import checks
from agent.operate.pinned import drops, maps, programs, rules, status
from agent.relay import interfaces as relay_interfaces
from agent.settings import admin_socket
from bpf import pins

_LOGS = (
    "var/log/pods/*podgate*/*/*.log",
    "var/log/containers/*podgate*.log",
)
_LOG_BYTES = 1 << 20
_MAX_LOGS = 5
_PEER = struct.Struct("=3i")  # `struct ucred`

# Contents of files of the kernel that describe it, and nothing of what runs on it.
_KERNEL_FILES = (
    *("/proc/version", "/proc/loadavg", "/proc/meminfo", "/proc/uptime", "/proc/modules"),
    *("/etc/os-release", "/sys/kernel/security/lockdown", "/sys/kernel/security/lsm"),
    *(f"/proc/sys/kernel/{name}" for name in ("bpf_stats_enabled", "unprivileged_bpf_disabled")),
    *(f"/proc/sys/net/core/bpf_jit_{name}" for name in ("enable", "harden", "kallsyms", "limit")),
    *("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/rp_filter"),
    *("/proc/sys/net/netfilter/nf_conntrack_count", "/proc/sys/net/netfilter/nf_conntrack_max"),
)
_FILE_SYSTEMS = frozenset(("bpf", "cgroup", "cgroup2"))

_SECRET_MAPS = ("reply_key",)
_SECRET_FIELDS = ("priority",)
_MAX_ENTRIES = 2000


def parts(
    run_directory: pathlib.Path,
    bpffs: pathlib.Path,
    *,
    is_agent_alive: bool,
    logs: Sequence[pathlib.Path] = (),
) -> Iterator[Part]:
    """All parts. is_agent_alive: whether it is requested, too; logs: further log files."""
    installation = pins.Pins(bpffs)
    socket_path = admin_socket(run_directory)
    if is_agent_alive:
        for name, resource in (
            *(("status.json", "/status"), ("drops.json", "/drops"), ("rules.json", "/rules")),
            *(("metrics.txt", "/metrics"), ("stacks.txt", "/stacks")),
        ):
            yield Part(f"agent/{name}", _fetched(socket_path, resource))
    yield Part("agent/process.json", lambda: agent_process(socket_path))
    yield Part("pins/status.json", lambda: status.read(installation, run_directory))
    yield Part("pins/drops.json", lambda: drops.read(installation, run_directory))
    yield Part("pins/rules.json", lambda: rules.read(installation, run_directory))
    yield Part("pins/maps.json", lambda: maps.read(maps.paths(installation)))
    yield Part("pins/entries.json", lambda: _entries(installation))
    yield Part("pins/programs.json", lambda: programs.read(installation))
    yield Part("doctor.json", lambda: asyncio.run(checks.run(bpffs, run_directory)))
    yield Part("network/nft.txt", _default_deny_table)
    yield Part("network/relay.json", relay_network)
    yield Part("kernel.json", kernel)
    yield Part("config.json", lambda: _config(run_directory))
    for number, path in enumerate((*logs, *_log_files())):
        yield Part(f"logs/{number}-{path.name}", _tail(path))


def agent_process(socket_path: pathlib.Path) -> dict[str, object]:
    """The process that listens on the admin socket, also if it hangs."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(str(socket_path))
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid = _PEER.unpack(credentials)[0]
    process = pathlib.Path(f"/proc/{pid}")
    arguments = process.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
    shown = ("State", "VmRSS", "VmHWM", "Threads", "voluntary_ctxt_switches")
    lines = process.joinpath("status").read_bytes().decode(errors="replace").split("\n")
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        "pid": pid,
        "options": shown_options(arguments),
        "status": {name: fields.get(name, "").strip() for name in shown},
        "threads": {
            thread.name: {
                "name": _text(thread / "comm"),
                "waitsIn": _text(thread / "wchan"),
                "kernelStack": _text(thread / "stack").splitlines(),
            }
            for thread in process.joinpath("task").iterdir()
        },
        "openFiles": len(list(process.joinpath("fd").iterdir())),
    }


def shown_options(arguments: Sequence[str]) -> list[str]:
    """The command line after `run`: options of this version with their values, nothing else."""
    from agent.operate.cli.commands.run import run

    options = {
        name: parameter
        for parameter in run.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    shown: list[str] = []
    takes_value = False
    for argument in arguments[_position_of_run(arguments) :]:
        name = argument.partition("=")[0]
        if takes_value:
            shown.append(argument)
            takes_value = False
        elif name in options:
            shown.append(argument)
            takes_value = "=" not in argument and not options[name].is_flag
        elif argument:
            shown.append(LEFT_OUT)
    return shown


def _position_of_run(arguments: Sequence[str]) -> int:
    return arguments.index("run") + 1 if "run" in arguments else len(arguments)


def relay_network() -> dict[str, object]:
    """Interfaces of the relay on the host, with their addresses and routes, and the routes that
    reserve its ranges."""
    found: dict[str, object] = {}
    with pyroute2.IPRoute() as netlink:
        for ifindex, name in relay_interfaces.present().items():
            (link,) = netlink.get_links(ifindex)
            found[name] = {
                "state": link.get_attr("IFLA_OPERSTATE"),
                "mtu": link.get_attr("IFLA_MTU"),
                "addresses": [
                    f"{one.get_attr('IFA_ADDRESS')}/{one['prefixlen']}"
                    for one in netlink.get_addr(index=ifindex)
                ],
                "routes": [_route(one) for one in netlink.get_routes(oif=ifindex)],
            }
        found["unreachable"] = [
            _route(one)
            for one in netlink.get_routes()
            if one["type"] == _UNREACHABLE and one.get_attr("RTA_DST")
        ]
    return found


_UNREACHABLE = 7  # RTN_UNREACHABLE


def _route(route: Any) -> str:
    return f"{route.get_attr('RTA_DST') or 'default'}/{route['dst_len']}"


def kernel() -> dict[str, object]:
    """Release, settings and mounts that podgate depends on."""
    mounts = pathlib.Path("/proc/self/mounts").read_bytes().decode(errors="replace").split("\n")
    return {
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "mounts": [one for one in mounts if _FILE_SYSTEMS.intersection(one.split(" ")[2:3])],
        "hasBtf": pathlib.Path("/sys/kernel/btf/vmlinux").exists(),
        "files": {path: _text(pathlib.Path(path)) for path in _KERNEL_FILES},
    }


def _fetched(path: pathlib.Path, resource: str) -> Callable[[], Content]:
    return lambda: asyncio.run(admin_client.fetch(path, resource))


def _entries(installation: pins.Pins) -> list[maps.MapContent]:
    found = []
    for name, path in maps.paths(installation).items():
        if name in _SECRET_MAPS:
            continue
        content = maps.entries(path)
        shown = content.entries[:_MAX_ENTRIES]
        for entry in shown:
            if isinstance(entry.value, dict):
                for field in _SECRET_FIELDS:
                    entry.value.pop(field, None)
        found.append(
            maps.MapContent(
                name=name,
                entries=shown,
                empty=content.empty,
                left_out=len(content.entries) - len(shown),
            )
        )
    return found


def _default_deny_table() -> str:
    async def query() -> str:
        texts = []
        for family in ruleset.FAMILIES:
            try:
                texts.append(await nft.query("list", "table", family, ruleset.TABLE))
            except nft.NftMissingError:
                raise
            except nft.NftError as error:
                texts.append(f"# table {family} {ruleset.TABLE}: {error}\n")
        return "".join(texts)

    return asyncio.run(query())


def _config(run_directory: pathlib.Path) -> dict[str, object]:
    """What podgate-cni reads, and which files exist; saved state is only listed."""
    return {
        "cniState": _text(run_directory / "cni.json"),
        "files": {
            str(path.relative_to(run_directory)): path.lstat().st_size
            for path in sorted(run_directory.rglob("*"))
            if path.is_file() or path.is_socket()
        },
    }


def _log_files() -> list[pathlib.Path]:
    """The newest log files of podgate's containers on this node, if it may be seen from here."""
    found = {path.resolve() for pattern in _LOGS for path in pathlib.Path("/").glob(pattern)}
    readable = [path for path in found if os.access(path, os.R_OK)]
    return sorted(readable, key=lambda path: path.stat().st_mtime, reverse=True)[:_MAX_LOGS]


def _tail(path: pathlib.Path) -> Callable[[], bytes]:
    def read() -> bytes:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read(_LOG_BYTES)

    return read


def _text(path: pathlib.Path) -> str:
    """The content of a file, or why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        return f"({error.strerror})"
