"""Records what a prober makes of tests/probes/hostile/cases.py.

`python -m tests.probes.hostile.recorder --prober CMD > FILE`, where FILE is
recorded/http1_answers.jsonl, or with `--seed` one of your own.

CMD is a program around the kubelet's own prober (k8s.io/kubernetes/pkg/probe/http: `New(false)` and
`NewRequestForHTTPGetAction`). It writes one line of JSON with its versions,
`{"go": "go1.26.10", "kubernetes": "v1.36.2"}`. Then for each line of JSON that it reads,
`{"address", "port", "path", "headers": [[name, value]], "timeout_seconds"}`, it probes once and
writes `{"result", "text", "error"}`: the text (of the error, if there is one) in base64, and
whether the prober returned an error.

Each case is probed twice, its answers in one piece and in many: if Go's own result depended on how
packets arrive, the record would have both.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import random
import re
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.probes.hostile import cases
from tests.probes.hostile.answers import ADDRESS, PORT, Answer, Case

RECORD = Path(__file__).parent / "recorded" / "http1_answers.jsonl"
TIMEOUT_SECONDS = 10.0
HOLD_TIMEOUT_SECONDS = 0.4
TEXT_MAX = 600
"""Longer texts are recorded by their start, those of a body also by their digest."""

_USUAL = "User-Agent: kube-probe/1.36\r\nAccept: */*\r\n"
_CLIENT_PORT = re.compile(r"tcp 127\.0\.0\.1:\d+->")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One probe's result as it is recorded."""

    result: str
    """As the kubelet spells it; with ` error` if its prober returned an error."""
    text: str
    requests: tuple[str, ...]
    """The request of each connection, without the usual headers; `TLS` for a ClientHello."""


def outcome(result: str, text: str, *, is_error: bool, requests: Iterable[bytes]) -> Outcome:
    text = _CLIENT_PORT.sub("tcp 127.0.0.1:*->", text)
    if len(text) > TEXT_MAX:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = text[:TEXT_MAX] + ("..." if result == "failure" else f"... {digest}")
    lines = tuple(
        "TLS" if data[:1] == b"\x16" else _short(data.decode("latin-1")) for data in requests
    )
    return Outcome(f"{result} error" if is_error else result, text, lines)


def _short(request: str) -> str:
    request = request.replace(_USUAL, "", 1).removesuffix("Connection: close\r\n\r\n")
    if len(request) > TEXT_MAX:
        return request[:TEXT_MAX] + "..." + hashlib.sha256(request.encode()).hexdigest()[:16]
    return request


PLAIN_REQUEST = f"GET / HTTP/1.1\r\nHost: {ADDRESS}:{PORT}\r\n"


def encoded(outcomes: Sequence[Outcome]) -> str:
    """One line of the record: each outcome, without the requests if it is one for `/`."""
    return json.dumps(
        [
            [found.result, found.text]
            if found.requests == (PLAIN_REQUEST,)
            else [found.result, found.text, found.requests]
            for found in outcomes
        ],
        separators=(",", ":"),
    )


def recorded(path: Path = RECORD) -> tuple[dict[str, Any], list[list[Outcome]]]:
    """The record's head, with its versions, and the outcomes of each case."""
    with path.open(encoding="utf-8") as lines:
        head = json.loads(next(lines))
        return head, [
            [
                Outcome(result, text, tuple(*rest) if rest else (PLAIN_REQUEST,))
                for result, text, *rest in json.loads(line)
            ]
            for line in lines
        ]


class AnswerServer:
    """Answers connections with a case's answers, in order."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(True)
        self._listener = listener
        self._lock = threading.Lock()
        self._answers: tuple[Answer, ...] = ()
        self._requests: list[bytes] = []
        self._pieces = random.Random(cases.SEED)
        self._in_pieces = False
        threading.Thread(target=self._accept, daemon=True).start()

    def expect(self, case: Case, *, in_pieces: bool = False) -> list[bytes]:
        """Serve this case from now on; the list fills with the requests."""
        with self._lock:
            self._answers = case.answers
            self._in_pieces = in_pieces
            self._requests = []
            return self._requests

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                number = len(self._requests)
                self._requests.append(b"")
                answer = self._answers[min(number, len(self._answers) - 1)]
                serve = (sock, answer, self._requests, number, self._in_pieces)
            threading.Thread(target=self._serve, args=serve, daemon=True).start()

    def _serve(
        self,
        sock: socket.socket,
        answer: Answer,
        requests: list[bytes],
        number: int,
        in_pieces: bool,
    ) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(TIMEOUT_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while b"\r\n\r\n" not in requests[number] and requests[number][:1] != b"\x16":
                data = sock.recv(65536)
                if not data:
                    return
                requests[number] += data
            for piece in self._split(answer.data) if in_pieces else [answer.data]:
                sock.sendall(piece)
                if in_pieces:
                    time.sleep(0.0005)
            if answer.end == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            if answer.end == "close":
                sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass

    def _split(self, data: bytes) -> Iterator[bytes]:
        most = max(3, len(data) // 8)
        while data:
            size = self._pieces.randrange(1, most)
            yield data[:size]
            data = data[size:]


def is_held(case: Case) -> bool:
    """Whether a probe of this case ends by its timeout."""
    return any(answer.end == "hold" for answer in case.answers)


class ProberProcess:
    """The prober of `--prober`."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions: dict[str, str] = self._read()

    def probe(self, case: Case) -> tuple[str, str, bool]:
        """Result, text, and whether it is an error."""
        assert self._process.stdin is not None
        question = {
            "address": ADDRESS,
            "port": PORT,
            "path": case.path,
            "headers": case.headers,
            "timeout_seconds": HOLD_TIMEOUT_SECONDS if is_held(case) else TIMEOUT_SECONDS,
        }
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        text = base64.b64decode(answer["text"]).decode("utf-8", "replace")
        return answer["result"], text, answer["error"]

    def close(self) -> None:
        self._process.communicate(timeout=10)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(
                f"the prober ended with status {self._process.wait()}; start it by hand to see why"
            )
        found: dict[str, Any] = json.loads(line)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prober", metavar="CMD", required=True, help="the kubelet's prober")
    parser.add_argument("--seed", type=int, default=cases.SEED, help="for other cases")
    arguments = parser.parse_args()
    prober = ProberProcess(arguments.prober)
    all_cases = cases.cases(arguments.seed)
    head = {
        **prober.versions,
        "seed": arguments.seed,
        "cases": len(all_cases),
        "digest": cases.digest(all_cases),
    }
    sys.stdout.write(json.dumps(head) + "\n")
    server = AnswerServer(socket.create_server((ADDRESS, PORT), backlog=64))
    for number, case in enumerate(all_cases):
        found: list[Outcome] = []
        for in_pieces in (False, True):
            requests = server.expect(case, in_pieces=in_pieces)
            result, text, is_error = prober.probe(case)
            one = outcome(result, text, is_error=is_error, requests=requests)
            if one not in found:
                found.append(one)
        sys.stdout.write(encoded(found) + "\n")
        if number % 500 == 499:
            sys.stderr.write(f"{number + 1} of {len(all_cases)}\n")
    server.close()
    prober.close()


if __name__ == "__main__":
    main()
