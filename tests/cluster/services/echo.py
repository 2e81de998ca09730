"""The server of a pod: `python3 echo.py NAME PORT...` listens for TCP and UDP on each port.

It runs with the image's Python, from a ConfigMap, so it imports nothing of the tests. A TCP client
sends something and closes its direction, a UDP client sends one datagram; both receive JSON: the
server's name (its host's, if NAME is empty), the client's address, the port, and how many bytes
arrived.
"""

import json
import socket
import sys
import threading


def answer(name: str, client: str, port: int, size: int) -> bytes:
    told = {"name": name, "client": client.removeprefix("::ffff:"), "port": port, "bytes": size}
    return json.dumps(told).encode()


def converse(connection: socket.socket, name: str, client: str, port: int) -> None:
    with connection:
        connection.settimeout(60)
        size = 0
        try:
            while chunk := connection.recv(65536):
                size += len(chunk)
            connection.sendall(answer(name, client, port, size))
        except OSError:
            return


def serve_tcp(name: str, port: int) -> None:
    with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        while True:
            connection, client = server.accept()
            threading.Thread(target=converse, args=(connection, name, client[0], port)).start()


def serve_udp(name: str, port: int) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
        while True:
            content, client = sock.recvfrom(65536)
            sock.sendto(answer(name, client[0], port, len(content)), client)


if __name__ == "__main__":
    for number in map(int, sys.argv[2:]):
        for serve in (serve_tcp, serve_udp):
            own_name = sys.argv[1] or socket.gethostname()
            threading.Thread(target=serve, args=(own_name, number)).start()
