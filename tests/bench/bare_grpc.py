"""The least that serves and calls gRPC: `python -m tests.bench.bare_grpc SOCKET`.

One asynchronous server on this Unix socket and a channel to it, as an agent has for its local API
and for the runtime; neither gets a call. It prints `ready`, and exits at the end of its standard
input.
"""

import asyncio
import sys

import grpc.aio


async def main() -> None:
    address = f"unix:{sys.argv[1]}"
    server = grpc.aio.server()
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
        await ended.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
