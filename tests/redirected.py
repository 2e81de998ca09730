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

_SERVER = """
import socket, sys
user, port = int(sys.argv[1]), int(sys.argv[2])
import os
os.setuid(user)
made = socket.socket(socket.AF_INET6)
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


def run(netns: Netns, *command: str, script: str | None = None) -> None:
    """Run a command inside the pod. script: its input."""
    subprocess.run(
        ["nsenter", f"--net={netns.path}", *command], input=script, text=True, check=True
    )


def nft(netns: Netns, script: str) -> None:
    run(netns, "nft", "-f", "-", script=script)


@contextlib.contextmanager
def proxy(netns: Netns) -> Iterator[None]:
    """A proxy of the user listens in the pod, and answers http requests; to /fail with 500."""
    command = [sys.executable, "-c", _SERVER, str(USER), str(PROXY)]
    with subprocess.Popen(
        ["nsenter", f"--net={netns.path}", *command], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()
