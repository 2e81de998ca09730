"""A stand-in for Linkerd's identity service: `python -m tests.meshes.linkerd_identity LEAF`.

It answers each request for a certificate with the same one. All other services of the control plane
are unimplemented here.
"""

import concurrent.futures
import pathlib
import sys
import time
from typing import Any

PORT = 9100
_CERTIFY = "/io.linkerd.proxy.identity.Identity/Certify"
_VALID_SECONDS = 86_400


def _varint(number: int) -> bytes:
    encoded = b""
    while number >= 0x80:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _serve(leaf: bytes) -> None:
    import grpc

    def certify(_request: bytes, _context: Any) -> bytes:
        # CertifyResponse: leaf_certificate, and valid_until as google.protobuf.Timestamp.
        until = b"\x08" + _varint(int(time.time()) + _VALID_SECONDS)
        return _field(1, leaf) + _field(3, until)

    class Identity(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            is_known = details.method == _CERTIFY
            return grpc.unary_unary_rpc_method_handler(certify) if is_known else None

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[Identity()])
    server.add_insecure_port(f"127.0.0.1:{PORT}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    _serve(pathlib.Path(sys.argv[1]).read_bytes())
