"""Pods with the rules and the proxy of a mesh: minimal ones, of nft, iptables and Python."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from probes.netns import Netns

PROXY = 15001
USER = 5995

CONSUL = f"""
table inet mesh {{
  chain out {{
    type nat hook output priority -100
    meta skuid {USER} return
    ip daddr 127.0.0.1 return
    meta l4proto tcp redirect to :{PROXY}
  }}
}}
"""
CONSUL_IPTABLES = [
    f"-A OUTPUT -p tcp -m owner --uid-owner {USER} -j RETURN",
    "-A OUTPUT -p tcp -d 127.0.0.1/32 -j RETURN",
    f"-A OUTPUT -p tcp -j REDIRECT --to-port {PROXY}",
]
"""Consul's, of control-plane/connect-inject."""
EXEMPTS_NOBODY = f"""
table inet mesh {{
  chain out {{
    type nat hook output priority -100
    meta l4proto tcp redirect to :{PROXY}
  }}
}}
"""
ISTIO = f"""
table inet mesh {{
  chain out {{
    type nat hook output priority -100
    meta l4proto tcp oifname lo meta skuid != {USER} return
    meta skuid {USER} return
    meta l4proto tcp redirect to :{PROXY}
  }}
}}
"""

ALL_PORTS = "1-15000"
"""But for those of meshes' proxies."""

_SERVER = """
import os, socket, sys
user, port, is_transparent = map(int, sys.argv[1:])
if not is_transparent:
    os.setuid(user)
made = socket.socket(socket.AF_INET6)
if is_transparent:
    made.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT, for both families
    made.setsockopt(socket.IPPROTO_IPV6, 75, 1)  # IPV6_TRANSPARENT
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
made.bind(("::", port))
made.listen()
print("ready", flush=True)
while True:
    accepted, _ = made.accept()
    accepted.settimeout(0.1)
    try:
        status = b"500" if b"/fail" in accepted.recv(4096) else b"200"
        accepted.sendall(b"HTTP/1.1 " + status + b" -\\r\\nContent-Length: 5\\r\\n\\r\\nproxy")
    except OSError:
        pass
    accepted.close()
"""


def one_port(port: int, exemption: str = "") -> str:
    """Rules that redirect one port. exemption: a rule before that."""
    return f"""
    table inet mesh {{
      chain out {{
        type nat hook output priority -100
        {exemption}
        tcp dport {port} redirect to :{PROXY}
      }}
    }}
    """


def tproxy(ports: str) -> str:
    """Rules that lead these ports to a transparent proxy, when packets enter by the loopback."""
    return f"""
    table inet mesh {{
      chain pre {{
        type filter hook prerouting priority mangle
        iifname lo meta l4proto tcp tcp dport {ports} tproxy to :{PROXY}
      }}
    }}
    """


def run(netns: Netns, *command: str, script: str | None = None) -> None:
    """Run a command inside the pod. script: its input."""
    subprocess.run(
        ["nsenter", f"--net={netns.path}", *command], input=script, text=True, check=True
    )


def nft(netns: Netns, script: str) -> None:
    run(netns, "nft", "-f", "-", script=script)


@contextlib.contextmanager
def proxy(netns: Netns, *, is_transparent: bool = False) -> Iterator[None]:
    """A proxy of the user listens in the pod, and answers http requests; to /fail with 500.

    is_transparent: it can accept what TPROXY leads to it. The socket is then root's.
    """
    arguments = [str(number) for number in (USER, PROXY, int(is_transparent))]
    command = [sys.executable, "-c", _SERVER, *arguments]
    with subprocess.Popen(
        ["nsenter", f"--net={netns.path}", *command], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()
