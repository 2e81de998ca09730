"""The servers in the demo's pods.

    python -m agent.operate.demo.servers http|grpc|tcp PORT [FAILURE_FILE]

Real servers of common kinds. The http server responds with 500 while FAILURE_FILE exists.
"""

import asyncio
import concurrent.futures
import os
import sys


async def _serve_http(port: int, failure_file: str | None) -> None:
    from agent.http_library import web

    async def healthz(request: web.Request) -> web.Response:
        if failure_file is not None and os.path.exists(failure_file):  # noqa: ASYNC240 - tmpfs
            return web.Response(status=500, text="failing\n")
        return web.Response(text="ok\n")

    app = web.Application()

    async def whoami(request: web.Request) -> web.Response:
        """The client's address, as the server sees it."""
        return web.Response(text=str(request.remote).removeprefix("::ffff:"))

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/whoami", whoami)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    await asyncio.Event().wait()


async def _serve_tcp(port: int) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        writer.close()

    server = await asyncio.start_server(greet, None, port)
    await server.serve_forever()


def _serve_grpc(port: int) -> None:
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"[::]:{port}")
    server.start()
    server.wait_for_termination()


def main() -> None:
    kind, port, *rest = sys.argv[1:]
    if kind == "grpc":
        _serve_grpc(int(port))
    elif kind == "tcp":
        asyncio.run(_serve_tcp(int(port)))
    else:
        asyncio.run(_serve_http(int(port), rest[0] if rest else None))


if __name__ == "__main__":
    main()
