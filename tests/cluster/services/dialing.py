"""A client of `echo.py`: `python3 dialing.py JSON`, with the arguments of `call` and `count`.

It imports nothing of the tests. Prints the answers as a list of JSON objects; one that failed has
only `error`, the name of the errno, and is the last one.
"""

import errno
import json
import socket
import sys

Answer = dict[str, object]


def call(
    kind: str, address: str, port: int, *, size: int, seconds: float, source_port: int
) -> Answer:
    """Send size bytes by a new socket, and return the answer. kind: tcp or udp; source_port: 0 for
    any; seconds: the limit of each wait."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    protocol = socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, protocol) as sock:
        sock.settimeout(seconds)
        try:
            sock.bind(("", source_port))
            sock.connect((address, port))
            return exchange(sock, size, is_stream=kind == "tcp")
        except TimeoutError:
            return {"error": "ETIMEDOUT"}
        except OSError as error:
            return {"error": errno.errorcode.get(error.errno or 0, str(error))}


def exchange(sock: socket.socket, size: int, *, is_stream: bool) -> Answer:
    sock.sendall(b"x" * size)
    if is_stream:
        sock.shutdown(socket.SHUT_WR)
    content = sock.recv(65536)
    while is_stream and (more := sock.recv(65536)):
        content += more
    found: Answer = json.loads(content) if content else {"error": "EOF"}
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    answers: list[Answer] = []
    for _ in range(given.pop("count")):
        answers.append(call(**given))
        if "error" in answers[-1]:
            break
    sys.stdout.write(json.dumps(answers))
