"""A toy agent: another process, of a user of its own, that reports conditions.

Arguments: the socket, the owner's name and the user id. Each line of its input is a call of the
publisher, as JSON: `["set", pod_uid, type, status, reason, message]`. Each line of its output is
what the publisher reports.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

_ROOT = pathlib.Path(__file__).parents[4]


@dataclasses.dataclass
class Toy:
    """One that runs."""

    process: asyncio.subprocess.Process

    def call(self, *call: str) -> None:
        """Call a method of its publisher."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(call).encode() + b"\n")

    async def received(self) -> list[str]:
        """What its publisher reports next."""
        assert self.process.stdout
        line = await self.process.stdout.readline()
        assert line, "the toy agent has ended"
        found: list[str] = json.loads(line)
        return found

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@contextlib.asynccontextmanager
async def running(socket: pathlib.Path, owner: str, user: int) -> AsyncIterator[Toy]:
    """A toy agent of this user."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, f"unix:{socket}", owner, str(user)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
    )
    toy = Toy(process)
    try:
        yield toy
    finally:
        if process.returncode is None:
            await toy.kill()


def main(target: str, owner: str, user: str) -> None:
    import grpc

    from agent.client import conditions

    def write(*found: Any) -> None:
        print(json.dumps(found), flush=True)  # noqa: T201

    # grpcio imports with its first channel, which the user may be unable to do.
    grpc.insecure_channel(target).close()
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    publisher = conditions.ConditionPublisher(
        owner,
        target,
        handlers=conditions.Handlers(
            on_problem=lambda problem: write("problem", problem),
            on_rejected=lambda one: write("rejected", one.type, one.code.name, one.message),
            on_reset=lambda uid, kind: write("reset", uid, kind),
        ),
        error_delay_seconds=0.05,
    )
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        getattr(publisher, method)(*arguments)
    publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
