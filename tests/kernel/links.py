"""Interfaces and settings of the host that a test makes for itself; removed after the block."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import stat
import struct
import subprocess
import tempfile
from collections.abc import Iterator

from agent.lab.lab import LAB_DIRECTORY, LabPod
from agent.linux import namespaces
from tests import polling

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000


def is_local(address: str) -> bool:
    """Whether this namespace accepts packets to the address."""
    done = subprocess.run(["ip", "route", "get", address], capture_output=True, text=True)
    return done.stdout.startswith("local ")


def ip(*commands: str) -> None:
    """Commands of ip(8), one after the other; the first that fails raises."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def ip_inside(pod: LabPod, *commands: str) -> None:
    """The same in a pod's namespace."""
    subprocess.run(
        ["nsenter", f"--net={pod.netns.path}", "ip", "-batch", "-"],
        input="\n".join(commands),
        text=True,
        check=True,
    )


def take_addresses(pod: LabPod, other: LabPod) -> None:
    """Give the pod the addresses of `other` instead of its own."""
    commands = [
        f"address {verb} {address}/{bits} dev eth0"
        for verb, whose in (("del", pod), ("add", other))
        for address, bits in ((whose.ipv4, 32), (whose.ipv6, 128))
    ]
    ip_inside(pod, *commands)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Another namespace's interfaces come and go, so that all others wait for RTNL."""
    script = (
        "while ip link add one type veth peer name two; do "
        "ip link set one up; ip link set two up; ip link del one; done"
    )
    with subprocess.Popen(["unshare", "--net", "sh", "-c", script]) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def blocked(*pods: LabPod) -> Iterator[None]:
    """Another rule set drops what the host sends to these pods, as some CNIs do; forwarded packets
    pass."""
    drops = "\n".join(
        f"{'ip6' if address.version == 6 else 'ip'} daddr {address} drop"
        for pod in pods
        for address in pod.addresses
    )
    chain = f"type filter hook output priority 0\n{drops}"
    rules = f"table inet another-firewall {{\nchain output {{\n{chain}\n}}\n}}\n"
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True, timeout=30)
    try:
        yield
    finally:
        delete = ["nft", "delete", "table", "inet", "another-firewall"]
        subprocess.run(delete, check=True, timeout=30)


def index_of(interface: str) -> int:
    return socket.if_nametoindex(interface)


def mac_of(interface: str) -> bytes:
    text = pathlib.Path("/sys/class/net", interface, "address")
    if text.exists():
        return bytes.fromhex(text.read_text().strip().replace(":", ""))
    with packet_socket(interface) as sock:  # /sys may show another namespace's interfaces
        return bytes(sock.getsockname()[4])


@contextlib.contextmanager
def packet_socket(interface: str) -> Iterator[socket.socket]:
    """A packet socket that only sends."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
        sock.bind((interface, 0))
        yield sock


@contextlib.contextmanager
def drop_is_enobufs() -> Iterator[None]:
    """Ignores ENOBUFS, with which a packet socket fails when a tc program drops its frame."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise


@contextlib.contextmanager
def on_one_cpu() -> Iterator[None]:
    """Otherwise two packets of a process that moves between CPUs may be reordered."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def made(interface: str, *commands: str) -> Iterator[None]:
    """Make interfaces by commands of ip(8); remove `interface`, with its dependents, afterwards."""
    ip(*commands)
    try:
        yield
    finally:
        ip(f"link del {interface}")


@contextlib.contextmanager
def route(address: str, interface: str) -> Iterator[None]:
    """A route to one address until the block ends."""
    family = "-6" if ":" in address else "-4"
    subprocess.run(["ip", family, "route", "add", address, "dev", interface], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", family, "route", "del", address, "dev", interface], check=True)


@contextlib.contextmanager
def default_route(gateway: str, interface: str) -> Iterator[None]:
    """The node's, by a gateway behind an interface."""
    family = "-6" if ":" in gateway else "-4"
    command = f"route {{}} default via {gateway} dev {interface} onlink"
    subprocess.run(["ip", family, *command.format("add").split()], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", family, *command.format("del").split()], check=True)


@contextlib.contextmanager
def policy_route(arrives_by: str, address: str, gateway: str, interface: str) -> Iterator[None]:
    """Packets to an address that come in by one interface go to a gateway instead."""
    family = "-6" if ":" in address else "-4"
    commands = (
        f"route {{}} {address} via {gateway} dev {interface} onlink table 718",
        f"rule {{}} iif {arrives_by} to {address} lookup 718",
    )
    for command in commands:
        subprocess.run(["ip", family, *command.format("add").split()], check=True)
    try:
        yield
    finally:
        for command in commands:
            subprocess.run(["ip", family, *command.format("del").split()], check=True)


@contextlib.contextmanager
def pair() -> Iterator[tuple[str, str]]:
    """A veth pair within the host: packets sent by one end are received by the other."""
    with made(
        "inner0",
        "link add inner0 type veth peer name inner1",
        "link set inner0 up",
        "link set inner1 up",
    ):
        yield "inner0", "inner1"


def wait_for_port(interface: str) -> None:
    """Until its bridge forwards by it, a moment after it is up."""

    def is_forwarding() -> bool:
        command = ["bridge", "-json", "link", "show", "dev", interface]
        shown = subprocess.run(command, check=True, capture_output=True).stdout
        return bool(json.loads(shown)[0]["state"] == "forwarding")

    polling.wait_until(f"port {interface} forwards", is_forwarding)


@contextlib.contextmanager
def macvlans() -> Iterator[tuple[str, str]]:
    """Two macvlan interfaces above one: packets sent by one are received by the other."""
    with made(
        "lower0",
        "link add lower0 type veth peer name lower1",
        "link set lower0 up",
        "link set lower1 up",
        "link add mac0 link lower0 type macvlan mode bridge",
        "link add mac1 link lower0 type macvlan mode bridge",
        "link set mac0 up",
        "link set mac1 up",
    ):
        yield "mac0", "mac1"


@contextlib.contextmanager
def tun(*, with_header: bool = False) -> Iterator[tuple[str, int]]:
    """A tun interface and the descriptor of its maker; with_header: packets begin with virtio's."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    try:
        _make_tun(descriptor, _IFF_VNET_HDR if with_header else 0)
        ip("link set tun-pg up")
        yield "tun-pg", descriptor
    finally:
        os.close(descriptor)  # removes the interface


@contextlib.contextmanager
def tun_inside(pod: LabPod) -> Iterator[int]:
    """The same in a pod's namespace: that of the thread which opens the file."""
    descriptor = pod.netns.run_inside(lambda: os.open("/dev/net/tun", os.O_RDWR))
    try:
        _make_tun(descriptor, 0)
        ip_inside(pod, "link set tun-pg up")
        yield descriptor
    finally:
        os.close(descriptor)


def _make_tun(descriptor: int, flags: int) -> None:
    request = struct.pack("16sH22x", b"tun-pg", _IFF_TUN | _IFF_NO_PI | flags)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)


@contextlib.contextmanager
def macvtap(lower: str) -> Iterator[tuple[str, int]]:
    """A macvtap interface above another one, and a descriptor by which a process sends frames of
    which each begins with a header of virtio."""
    with made("tap-pg", f"link add tap-pg link {lower} type macvtap mode bridge"):
        ip("link set tap-pg up")
        descriptor = _open_tap("tap-pg")
        try:
            yield "tap-pg", descriptor
        finally:
            os.close(descriptor)


def _open_tap(interface: str) -> int:
    """Only this namespace's sysfs shows the device's number; /dev may have no name for it."""
    index = index_of(interface)
    with tempfile.TemporaryDirectory(dir=LAB_DIRECTORY) as directory:
        namespaces.mount("sysfs", pathlib.Path(directory))
        try:
            text = pathlib.Path(directory, "class", "net", interface, f"tap{index}", "dev")
            major, minor = map(int, text.read_text().split(":"))
        finally:
            namespaces.unmount(directory)
        device = pathlib.Path(directory, interface)
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        return os.open(device, os.O_RDWR)


@contextlib.contextmanager
def vxlan(mac: bytes, port: int, network: int, local: str) -> Iterator[None]:
    """The host's end of an overlay network, which listens on one of the host's addresses."""
    name = "vxlan6-pg" if ":" in local else "vxlan4-pg"
    with made(
        name,
        f"link add {name} address {mac.hex(':')} type vxlan id {network} dstport {port} "
        f"local {local} nolearning",
        f"link set {name} up",
    ):
        yield


@contextlib.contextmanager
def sysctl(name: str, value: str) -> Iterator[None]:
    """A setting of the node's namespace, as below /proc/sys."""
    path = pathlib.Path("/proc/sys", name)
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


def let_forward(pod: LabPod) -> None:
    """Make a pod a router until it is deleted."""
    names = ("ipv4/ip_forward", "ipv6/conf/all/forwarding")
    run_inside(pod, "; ".join(f"echo 1 > /proc/sys/net/{name}" for name in names))


def run_inside(pod: LabPod, script: str) -> None:
    """By a shell in the pod's network namespace."""
    subprocess.run(["nsenter", f"--net={pod.netns.path}", "sh", "-c", script], check=True)


@contextlib.contextmanager
def table(family: str, body: str) -> Iterator[None]:
    """An nftables table of the test's own."""
    script = f"table {family} test-pg {{\n{body}\n}}\n"
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", family, "test-pg"], check=True)


@contextlib.contextmanager
def table_inside(pod: LabPod, family: str, body: str) -> Iterator[None]:
    """The same in a pod's namespace, until the pod is deleted."""
    script = f"table {family} test-pg {{\n{body}\n}}\n"
    enter = ["nsenter", f"--net={pod.netns.path}"]
    subprocess.run([*enter, "nft", "-f", "-"], input=script, text=True, check=True)
    yield
