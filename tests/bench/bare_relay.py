"""The least that a relay does for a connection: accept, connect, a copy each way, close.

`python -m tests.bench.bare_relay ADDRESS HOST PORT` prints `ready` and carries what connects to
this port of ADDRESS to HOST, one connection at a time: no namespaces, time limits or heartbeat.
bare_relay.c is the same in C.
"""

import socket
import sys

_BYTES = 4096


def main() -> None:
    address, host, port = sys.argv[1:]
    with socket.create_server((address, int(port))) as listener:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            client, _ = listener.accept()
            with client, socket.create_connection((host, int(port))) as pod:
                pod.sendall(client.recv(_BYTES))
                client.sendall(pod.recv(_BYTES))


if __name__ == "__main__":
    main()
