"""A real gRPC server with health checking: `python -m tests.probes.grpc_server ADDRESS:PORT`.

grpcio cannot be given a socket, so this runs as a process inside the sandbox.
It prints `ready`, and ends with its standard input.
"""

from __future__ import annotations

import pathlib
import sys
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main(address: str, certificate: str = "", key: str = "", authorities: str = "") -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("ill", health_pb2.HealthCheckResponse.NOT_SERVING)
    if address.endswith(":50052"):
        pass  # a gRPC server without the health service
    else:
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if certificate:
        with open(certificate, "rb") as cert_file, open(key, "rb") as key_file:
            pair = (key_file.read(), cert_file.read())
        trusted = pathlib.Path(authorities).read_bytes() if authorities else None
        credentials = grpc.ssl_server_credentials([pair], trusted, trusted is not None)
        server.add_secure_port(address, credentials)
    else:
        server.add_insecure_port(address)
    server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    main(*sys.argv[1:])
