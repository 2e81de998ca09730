"""Connects from where it is to a list of targets at once: `python3 dialer.py < LIST`.

LIST is JSON: a list of [name, address, port, "tcp" or "udp"]. The output is JSON: by name, the
client's address that the server saw, or the name of the error. It imports nothing of the project,
since it runs in namespaces and cgroups of pods.
"""

import concurrent.futures
import errno
import json
import socket
import sys

SECONDS = 3.0
_THREADS = 32


def dial(address: str, port: int, protocol: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as client:
        client.settimeout(SECONDS)
        try:
            client.connect((address, port))
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = b""
            while part := client.recv(4096):
                answer += part
                if protocol == "udp":
                    break
        except TimeoutError:
            return "ETIMEDOUT"
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
    return answer.rpartition(b"\r\n")[2].decode() or "no answer"


def main() -> None:
    targets = json.load(sys.stdin)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = {name: pool.submit(dial, *target) for name, *target in targets}
    json.dump({name: one.result() for name, one in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
